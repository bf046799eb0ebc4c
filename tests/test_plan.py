"""The bucket plan: a pure function, checked on arbitrary sizes."""

from hypothesis import given
from hypothesis import strategies as st

from drivetrain import _C

ALIGNMENT = 64
sizes = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2)), min_size=1, max_size=40
)
caps = st.lists(st.integers(1, 20_000), min_size=1, max_size=4)


@given(sizes, caps, st.randoms(use_true_random=False))
def test_every_parameter_once_up_to_the_caps_and_in_order(sizes, caps, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(sizes)))
    random.shuffle(order)
    position = {param: i for i, param in enumerate(order)}
    plan = _C.plan_buckets(sizes, order, caps)

    assert sorted(param for _, _, slots in plan for param, _ in slots) == sorted(order)
    made_of_group: dict[int, int] = {}
    for group, num_bytes, slots in plan:
        end = 0
        for param, offset in slots:
            numel, element_bytes, param_group = sizes[param]
            assert param_group == group
            assert offset % ALIGNMENT == 0
            assert offset == end
            end = -(-(offset + numel * element_bytes) // ALIGNMENT) * ALIGNMENT
        assert num_bytes == end
        cap = caps[min(made_of_group.get(group, 0), len(caps) - 1)]
        assert slots[-1][1] < cap  # the last parameter was still wanted
        is_last_of_group = all(g != group for g, _, _ in plan[plan.index((group, num_bytes, slots)) + 1 :])
        assert num_bytes >= cap or is_last_of_group
        made_of_group[group] = made_of_group.get(group, 0) + 1
    # Within a group gradients keep their order, and buckets come as they are complete.
    for group in made_of_group:
        seen = [position[param] for g, _, slots in plan if g == group for param, _ in slots]
        assert seen == sorted(seen)
    last = [max(position[param] for param, _ in slots) for _, _, slots in plan]
    assert last == sorted(last)


def test_the_first_bucket_may_be_smaller() -> None:
    plan = _C.plan_buckets([(256, 4, 0)] * 6, [5, 4, 3, 2, 1, 0], [1024, 3072])
    assert [[param for param, _ in slots] for _, _, slots in plan] == [[5], [4, 3, 2], [1, 0]]


def test_small_parameters_between_large_ones_share_their_buckets() -> None:
    plan = _C.plan_buckets([(1000, 4, 0), (10, 4, 0)] * 3, [5, 4, 3, 2, 1, 0], [2000])
    assert [[param for param, _ in slots] for _, _, slots in plan] == [[5, 4], [3, 2], [1, 0]]
