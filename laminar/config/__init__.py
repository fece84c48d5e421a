"""Names every setting of a run, with its default, unit and meaning. `laminar config` prints it as a table."""

from laminar.config.cluster import ClusterConfig, FaultsConfig, ObserveConfig, RelayConfig
from laminar.config.config import Config
from laminar.config.data import BatchConfig, BufferConfig, DataConfig, ModelConfig
from laminar.config.losses import (
    CispoLoss,
    DecoupledPpoLoss,
    DrGrpoLoss,
    GrpoLoss,
    GspoLoss,
    LossConfig,
    TisLoss,
)
from laminar.config.rollout import (
    EmbeddedEngineConfig,
    EngineConfig,
    EvaluationConfig,
    PacedConfig,
    RepackConfig,
    RewardConfig,
    RolloutConfig,
    VllmEngineConfig,
)
from laminar.config.schedule import ScheduleConfig, SynchronousSchedule, TrajectoryLevelSchedule
from laminar.config.section import Count, Fraction, FunctionPath, Seconds, Section
from laminar.config.train import CheckpointConfig, OverlongConfig, TrainerConfig

__all__ = [
    "BatchConfig",
    "BufferConfig",
    "CheckpointConfig",
    "CispoLoss",
    "ClusterConfig",
    "Config",
    "Count",
    "DataConfig",
    "DecoupledPpoLoss",
    "DrGrpoLoss",
    "EmbeddedEngineConfig",
    "EngineConfig",
    "EvaluationConfig",
    "FaultsConfig",
    "Fraction",
    "FunctionPath",
    "GrpoLoss",
    "GspoLoss",
    "LossConfig",
    "ModelConfig",
    "ObserveConfig",
    "OverlongConfig",
    "PacedConfig",
    "RelayConfig",
    "RepackConfig",
    "RewardConfig",
    "RolloutConfig",
    "ScheduleConfig",
    "Seconds",
    "Section",
    "SynchronousSchedule",
    "TisLoss",
    "TrainerConfig",
    "TrajectoryLevelSchedule",
    "VllmEngineConfig",
]
