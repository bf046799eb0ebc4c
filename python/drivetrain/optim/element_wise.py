"""torch's optimizers whose rules look at one element at a time, with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import TorchsOptions, follows
from .rule import Group, Rule

NUMBERS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")


def adam_name(group: Group) -> str:
    """Returns the native rule of a group of Adam's."""
    return "adam_amsgrad" if group["amsgrad"] else "adam"


@follows(Rule(adam_name, NUMBERS))
class Adam(FusedOptimizer, torch.optim.Adam):
    """Source: Kingma & Ba 2015, algorithm 1; AMSGrad after Reddi et al. 2018, as torch implements it.

    Args:
        amsgrad: Divides by the largest mean of squares so far.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


@follows(Rule(adam_name, NUMBERS))
class AdamW(Adam, torch.optim.AdamW):
    """Adam with decoupled weight decay.

    Source: Loshchilov & Hutter 2019, algorithm 2.

    Args:
        weight_decay: Decoupled weight decay.
        amsgrad: Divides by the largest mean of squares so far.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


def _sgd_name(group: Group) -> str:
    return "sgd_momentum" if group["momentum"] else "sgd"


def _step_sgd(optimizer: Any, group: Group, params: list[Tensor]) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    buffers: list[Tensor | None] = [optimizer.state.get(param, {}).get("momentum_buffer") for param in params]
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    sgd(params, grads, buffers, has_sparse_grad=True, foreach=False, **{name: group[name] for name in names})
    if group["momentum"]:
        for param, buffer in zip(params, buffers, strict=True):
            optimizer.state[param]["momentum_buffer"] = buffer


@follows(Rule(_sgd_name, ("momentum", "dampening", "weight_decay", "nesterov", "maximize"), step_sparse=_step_sgd))
class SGD(FusedOptimizer, torch.optim.SGD):
    """Sparse gradients are stepped by torch's function.

    Args:
        dampening: Reduces the weight of a gradient in the momentum.
        nesterov: Uses Nesterov's momentum; needs a momentum and no dampening.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


def _step_adagrad(optimizer: Any, group: Group, params: list[Tensor]) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    sums, steps = ([optimizer.state[param][name] for param in params] for name in ("sum", "step"))
    options = {name: group[name] for name in ("lr", "weight_decay", "lr_decay", "eps", "maximize")}
    adagrad(params, grads, sums, steps, has_sparse_grad=True, foreach=False, **options)


@follows(
    Rule(
        "adagrad",
        ("lr_decay", "weight_decay", "eps", "maximize"),
        initials={"sum": "initial_accumulator_value"},  # as in torch, both parts of complex parameters
        step_sparse=_step_adagrad,
    )
)
class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """Sparse gradients are stepped by torch's function.

    Source: Duchi et al. 2011, section 1.1, as torch implements it.

    Args:
        lr_decay: Divides the learning rate by 1 + (step - 1) * lr_decay.
        initial_accumulator_value: Value of every sum of squares before the first step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


def _rmsprop_name(group: Group) -> str:
    centered, momentum = bool(group["centered"]), bool(group["momentum"] > 0)
    return "rmsprop" + "_centered" * centered + "_momentum" * momentum


@follows(Rule(_rmsprop_name, ("alpha", "eps", "weight_decay", "momentum", "maximize")))
class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """Source: Tieleman & Hinton 2012, lecture 6.5; centered after Graves 2013, equations 38 to 41.

    Args:
        alpha: Decay rate of the mean of squares.
        centered: Divides by the gradients' estimated standard deviation.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


@follows(Rule("adadelta", ("rho", "eps", "weight_decay", "maximize")))
class Adadelta(FusedOptimizer, torch.optim.Adadelta):
    """Source: Zeiler 2012, "ADADELTA: An Adaptive Learning Rate Method", algorithm 1, as torch implements it.

    Args:
        rho: Decay rate of the means of squares.
        eps: Added to both means before their roots.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


@follows(Rule("adamax", ("betas", "eps", "weight_decay", "maximize")))
class Adamax(FusedOptimizer, torch.optim.Adamax):
    """With `state_bits=8` the norm has the codes of means of squares, which are never 0 where it is not.

    Source: Kingma & Ba 2015, algorithm 2, as torch implements it: `eps` is added to the magnitude of the gradient.

    Args:
        betas: Decay rates of the mean of gradients and of their infinity norm.
        eps: Added to the magnitude of each gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


@follows(Rule("radam", NUMBERS))
class RAdam(FusedOptimizer, torch.optim.RAdam):
    """Source: Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond", algorithm 2, as torch
    implements it.

    Args:
        weight_decay: L2 penalty, or decoupled weight decay.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


@follows(Rule("nadam", (*NUMBERS, "momentum_decay"), initials={"mu_product": 1.0}))
class NAdam(FusedOptimizer, torch.optim.NAdam):
    """The state keeps the product of all momenta, `mu_product`, as torch does.

    Source: Dozat 2016, "Incorporating Nesterov Momentum into Adam", algorithm 2, as torch implements it.

    Args:
        weight_decay: L2 penalty, or decoupled weight decay.
        momentum_decay: Decay of the momentum: its factor in step t is 1 - 0.96**(t * momentum_decay) / 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


@follows(
    Rule("asgd", ("lambd", ("alpha", "average_decay"), "t0", "weight_decay", "maximize"), {"eta": "lr", "mu": 1.0})
)
class ASGD(FusedOptimizer, torch.optim.ASGD):
    """The state keeps the average `ax`, and the step size `eta` and the weight `mu` of the next step, as torch does.

    Source: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging", as torch implements it.

    Args:
        lambd: Decay of parameters per step, times the step size.
        alpha: Power of the decay of the step size.
        t0: Step after which parameters are averaged.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        **options: Unpack[TorchsOptions],
    ) -> None: ...


@follows(
    Rule(
        "rprop",
        (("etas", "eta_minus", "eta_plus"), ("step_sizes", "step_size_min", "step_size_max"), "maximize"),
        initials={"step_size": "lr"},
    )
)
class Rprop(FusedOptimizer, torch.optim.Rprop):
    """Feed it the gradients of whole epochs: the rule looks at signs only.

    Source: Riedmiller & Braun 1993, "A direct adaptive method for faster backpropagation learning: the RPROP
    algorithm", as torch implements it.

    Args:
        lr: Step size of every element before the first step; later values have no effect.
        etas: Factors of the step size where the sign of the gradient changes, and where it stays.
        step_sizes: Bounds of the step sizes.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        **options: Unpack[TorchsOptions],
    ) -> None: ...
