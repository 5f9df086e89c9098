"""Configuration: the typed schema, where its YAML comes from, and what is refused before anything starts."""

from kvflow.config.catalogue import PolicyOption, policy_options
from kvflow.config.compose import compose, conf_dir, register
from kvflow.config.load import load
from kvflow.config.rules import check_servable
from kvflow.config.schema import (
    EMBEDDED,
    AdminConfig,
    AuthConfig,
    ClusterConfig,
    Config,
    ConnectorConfig,
    ConversationsConfig,
    Device,
    Dtype,
    Format,
    Kind,
    ModelConfig,
    OnLoadFailure,
    PlanConfig,
    Pool,
    RouterConfig,
    SimulatedConfig,
    TenantConfig,
)

__all__ = [
    "EMBEDDED",
    "AdminConfig",
    "AuthConfig",
    "ClusterConfig",
    "Config",
    "ConnectorConfig",
    "ConversationsConfig",
    "Device",
    "Dtype",
    "Format",
    "Kind",
    "ModelConfig",
    "OnLoadFailure",
    "PlanConfig",
    "PolicyOption",
    "Pool",
    "RouterConfig",
    "SimulatedConfig",
    "TenantConfig",
    "check_servable",
    "compose",
    "conf_dir",
    "load",
    "policy_options",
    "register",
]
