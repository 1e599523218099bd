"""Networks: `build` makes one by name, `Network` is their class."""

from lipflow.models.by_name import MODELS, Model, build, list_models
from lipflow.models.file import save
from lipflow.models.network import Network

__all__ = ["MODELS", "Model", "Network", "build", "list_models", "save"]
