"""Builds the loss that the configuration names."""

from typing import assert_never

from laminar.config import CispoLoss, DecoupledPpoLoss, DrGrpoLoss, GrpoLoss, GspoLoss, LossConfig, TisLoss
from laminar.train.losses.cispo import Cispo
from laminar.train.losses.decoupled_ppo import DecoupledPpo
from laminar.train.losses.dr_grpo import DrGrpo
from laminar.train.losses.grpo import Grpo
from laminar.train.losses.gspo import Gspo
from laminar.train.losses.loss import Loss
from laminar.train.losses.tis import Tis


def build_loss(config: LossConfig) -> Loss:
    match config:
        case GrpoLoss():
            return Grpo(config)
        case DecoupledPpoLoss():
            return DecoupledPpo(config)
        case TisLoss():
            return Tis(config)
        case CispoLoss():
            return Cispo(config)
        case GspoLoss():
            return Gspo(config)
        case DrGrpoLoss():
            return DrGrpo(config)
        case _:
            assert_never(config)
