"""Defines what every group of settings is, and the kinds of values that settings have."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
FunctionPath = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]


class Section(BaseModel):
    """A group of settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
