"""Models by name: `models.toml`, and getting their files onto this disk. Imports no torch."""

from specgen.registry.entries import DEFAULT_MODEL, Artefact, Entry, Registry, load_registry
from specgen.registry.fetch import PulledModel, cache_path, fetch, find, kept_here, pull, remove
from specgen.registry.progress import Progress
from specgen.registry.refs import ModelRef, draft_of, resolve_model
from specgen.registry.sources import HubSource, LocalSource, PypiSource, Source

__all__ = [
    "DEFAULT_MODEL",
    "Artefact",
    "Entry",
    "HubSource",
    "LocalSource",
    "ModelRef",
    "Progress",
    "PulledModel",
    "PypiSource",
    "Registry",
    "Source",
    "cache_path",
    "draft_of",
    "fetch",
    "find",
    "kept_here",
    "load_registry",
    "pull",
    "remove",
    "resolve_model",
]
