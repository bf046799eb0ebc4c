"""Tests that each row of the table of restarts in docs/checkpoints.md has a test."""

import ast
from pathlib import Path

TESTS = {
    "a process that is killed at any moment": "test_resume: test_a_killed_run_continues_with_the_same_bits",
    "averaged weights, two optimizers, replay buffers, loaders of which every step takes a batch, own samplers": (
        "test_crashes: test_loops_of_strangers_continue_with_the_same_bits"
    ),
    "parameters that are written between `ckpt.step()` and the next step": (
        "test_crashes: test_a_checkpoint_has_the_values_of_its_step"
    ),
    "Lightning's averages, and callbacks with a state or with `on_save_checkpoint`": (
        "frameworks/test_lightning_callbacks: test_a_killed_training_with_callbacks_continues_with_the_same_bits"
    ),
    "children that NumPy's `Generator.spawn` makes after a restart": (
        "test_checkpointer: test_a_generator_spawns_the_children_that_it_would_have_spawned"
    ),
    "a sampler with its own generator, drawn at the begin or per batch": (
        "test_loader: test_samplers_that_draw_by_themselves"
    ),
    "a sampler that counts its own `epoch`": "test_loader: test_samplers_that_count_epochs_themselves",
    "a second pass over the loader within an epoch": ("test_loader: test_iterations_without_a_step_are_no_epochs"),
    "two loaders in a `zip()`": "test_loader: test_loaders_that_are_iterated_together",
    "a signal to the whole job, with loader workers": (
        "test_preemption: test_a_signal_to_a_job_with_workers_saves_the_last_step"
    ),
    "parameters or groups in another order": "test_saved_optimizer: test_states_follow_names",
    "`torch.compile` of the model or of submodules, on or off": (
        "test_saved_optimizer: test_compiled_submodules_have_the_names_of_plain_ones"
    ),
    "`ResumableSampler` on another number of ranks or with another batch size": (
        "test_checkpointer: test_other_numbers_of_ranks_continue_with_each_sample_once"
    ),
    "sharded states on another number of ranks": (
        "test_sharded: test_a_sharded_state_goes_to_other_numbers_of_ranks_and_back"
    ),
    "a plain loader with another dataset length at the end of an epoch": (
        "test_loader: test_a_grown_dataset_begins_with_the_next_epoch"
    ),
    "an empty directory of the same name, as on a new host, with a `Remote`": (
        "test_tiers: test_checkpoints_are_uploaded_and_continued_elsewhere"
    ),
    "a damaged newest checkpoint, and an older or remote one that is intact": (
        "test_damage: test_a_remote_copy_is_intact"
    ),
    "other environment, such as the version of torch": (
        "test_checkpointer: test_another_configuration_warns_and_names_the_differences"
    ),
    "no intact checkpoint": "test_damage: test_the_only_checkpoint_is_damaged",
    "a plain loader with another batch size or dataset length, inside of an epoch": (
        "test_loader: test_a_grown_dataset_or_another_batch_size_raises_within_an_epoch"
    ),
    "`ResumableSampler` with another dataset length": (
        "test_loader: test_a_resumable_sampler_takes_another_batch_size_and_refuses_another_length"
    ),
    "`in_order=False` with workers": "test_loader: test_batches_in_any_order_are_refused",
    "an iterator that was made before the block": (
        "test_loader: test_an_iterator_of_before_the_block_raises_at_the_first_step"
    ),
    "`StatefulDataLoader` or an object with a state, on another number of ranks": (
        "test_loader: test_another_number_of_ranks_raises_where_no_sampler_knows_it"
    ),
    "`next(iter(loader))` after a restart at the last step of an epoch": (
        "test_loader: test_a_batch_by_hand_after_the_last_step_of_an_epoch"
    ),
    "states of another kind of optimizer": "test_saved_optimizer: test_another_optimizer_is_named",
    "other names or shapes of parameters": "test_identity: test_another_model_raises_and_says_how_to_begin_anew",
    "buffers that a module's own loading resizes or adds, as in quantization-aware training": (
        "test_checkpointer: test_a_module_that_resizes_its_buffers_is_restored"
    ),
    "a model that does not load what it saves, such as layers of bitsandbytes": (
        "test_checkpointer: test_a_model_that_does_not_load_what_it_saves_is_refused_before_the_training"
    ),
    "nested tensors, and tensor subclasses that wrap other tensors": (
        "test_encoding: test_what_has_no_encoding_is_named"
    ),
    "a user who may not write to the directory": (
        "test_directory: test_a_colleague_who_may_not_write_is_refused_before_the_training"
    ),
    "other values in `config`": "test_identity: test_other_settings_raise_and_say_how_to_go_on",
    "a directory whose checkpoints were all deleted": "test_identity: test_deleted_checkpoints_do_not_begin_anew",
    "two runs with one remote URL": "test_identity: test_two_runs_that_begin_together_do_not_share_a_url",
    "steps without another batch of the loader, such as after a loader that is made again in each epoch": (
        "test_loader: test_a_loader_that_is_made_again_in_each_epoch_warns"
    ),
    "several loaders, one after the other in each epoch": "test_loader: test_what_the_documentation_says_is_not_seen",
    "`zip(loader, cycle(other))` with a new generator in each epoch": (
        "test_loader: test_what_the_documentation_says_is_not_seen"
    ),
    "a loop that fetches a batch ahead by itself; use `drivetrain.data.prefetch`": (
        "test_loader: test_what_the_documentation_says_is_not_seen"
    ),
    "another model with equal names and shapes, without `config`": (
        "test_identity: test_what_the_documentation_says_is_not_seen"
    ),
    "a copied directory that is continued twice without remotes": (
        "test_identity: test_what_the_documentation_says_is_not_seen"
    ),
    "a sampler that draws from the default generators with each batch, with workers": (
        "test_loader: test_what_the_documentation_says_is_not_seen"
    ),
    "changed contents of a dataset of equal length": "test_loader: test_what_the_documentation_says_is_not_seen",
    "random numbers that the script draws at the begin of an epoch": (
        "test_loader: test_what_the_documentation_says_is_not_seen"
    ),
}


def test_each_row_has_a_test(repository: Path) -> None:
    page = (repository / "docs/checkpoints.md").read_text()
    lines = page.partition("## What a restart restores")[2].partition("\n## ")[0].splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][2:]
    assert rows == list(TESTS)
    for place in TESTS.values():
        name, _, test = place.partition(": ")
        file = name if "/" in name else f"checkpointing/{name}"
        tree = ast.parse((repository / f"tests/{file}.py").read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place
