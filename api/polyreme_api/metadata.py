"""Metadata of objects of all kinds: the part of ``metav1.ObjectMeta`` that is read; the rest is kept."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from polyreme_api.fields import Part

JOB_NAME_CHARACTERS_MAX = 40
"""A pod's name is its job's name with a suffix."""
CLUSTER_NAME_CHARACTERS_MAX = 63
"""A queue's name is also the value of a label."""
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


class AnyMeta(BaseModel):
    """What every object has in addition to its name."""

    model_config = ConfigDict(frozen=True, extra="allow", alias_generator=to_camel, populate_by_name=True)

    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ObjectMeta(AnyMeta):
    """Metadata of an object in a namespace."""

    name: Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=JOB_NAME_CHARACTERS_MAX)]
    namespace: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)] = "default"


class ClusterMeta(AnyMeta):
    """Metadata of an object of the whole cluster."""

    name: Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=CLUSTER_NAME_CHARACTERS_MAX)]


class Object(Part):
    """Base of our kinds; each adds ``kind``, metadata, spec and status."""

    api_version: Literal["polyreme.dev/v1alpha1"]

    def to_object(self) -> dict[str, Any]:
        """Return the Kubernetes-shaped dictionary, defaults written out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
