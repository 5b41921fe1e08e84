"""The sections of settings that a config is made of."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from lockstep.config.redact import HIDDEN

MOST = 2**63 - 1
"""The highest whole number that a setting may have: what 64 bits hold, as arrays and files do."""
MOST_SIZE = 10**9
"""The highest number of environments, steps, episodes, passes or frames, of which there are arrays."""
MOST_UNITS, MOST_LAYERS, MOST_PIXELS = 10**8, 1000, 10_000
MOST_SEED = 10**40 - 1


def is_url(text: str) -> bool:
    """Returns whether a text is a place that fsspec knows by its scheme, rather than a name or a directory."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://.", text) is not None


class Section(BaseModel):
    """A frozen group of settings that knows every one of its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _scientific(cls, values: Any) -> Any:
        """Lets whole numbers be written as 1e6, which YAML reads as text."""
        if not isinstance(values, dict):
            return values
        whole = {name for name, info in cls.model_fields.items() if info.annotation in (int, int | None)}
        pattern = re.compile(r"\d+(\.\d+)?[eE]\+?\d{1,2}")
        return {
            k: float(v) if k in whole and isinstance(v, str) and pattern.fullmatch(v) else v for k, v in values.items()
        }

    @field_validator("*")
    @classmethod
    def _within_64_bits(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > MOST and info.field_name != "seed":
            raise ValueError(f"{value}: at most {MOST}")
        return value


class AtariConfig(Section):
    """The standard wrappers of Atari games (Mnih et al. 2015; Machado et al. 2018); the presets of ALE ids have it."""

    enabled: bool = Field(default=False, description="wrap an ALE game; its own frame skip is switched off")
    noop_max: int = Field(default=30, ge=0, description="most no-ops at the start of a game; 0: none")
    frame_skip: int = Field(default=4, ge=1, description="frames of an action; of the last two the brighter pixels")
    screen_size: int = Field(default=84, ge=1, le=MOST_PIXELS, description="pixels of the picture's height and width")
    grayscale: bool = Field(default=True, description="one channel instead of three")
    terminal_on_life_loss: bool = Field(
        default=True, description="a lost life ends an episode for the learner; games and scores go on"
    )
    fire_reset: bool = Field(default=True, description="press FIRE when a game or life begins, where there is FIRE")

    @model_validator(mode="before")
    @classmethod
    def _from_enabled(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value


SHORT_IDS = {"Snake-v0": "lockstep/Snake-v0"}
"""Short ids of our environments that no other package registers."""
JAX_FAMILIES = ("gymnax/", "brax/", "playground/")
"""Prefixes of the ids of environments that are written in JAX."""


class EnvConfig(Section):
    """The environment."""

    id: str = Field(
        default="CartPole-v1",
        min_length=1,
        description="Gymnasium id ('module:Id-v0' imports module first); engine jax: gymnax/, brax/, playground/ too",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment, as JSON")
    backend: Literal["auto", "gymnasium", "envpool", "tensor", "jax"] = Field(
        default="auto",
        description="auto: lockstep/ ids as arrays, gymnax/, brax/ and playground/ ids by JAX, others by Gymnasium; "
        "gymnasium: one by one; envpool: EnvPool's of this id; tensor: on the policy's device, lockstep/ ids or a "
        "simulator ('module:function'); jax: in the compiled program, lockstep/ ids or a class ('module:Class')",
    )
    max_episode_steps: int | None = Field(
        default=None, ge=1, description="time limit in steps; None: the environment's own"
    )
    action_mask: str | None = Field(
        default=None,
        min_length=1,
        description="which actions are allowed: info (info['action_mask']), method (env.action_masks()), or an entry "
        "of a Dict observation; None: all",
    )
    frame_skip: int = Field(default=1, ge=1, description="steps that each action is repeated for; rewards add up")
    frame_stack: int = Field(
        default=1,
        ge=1,
        le=MOST_SIZE,
        description="newest observations in one: channels of images, one vector of vectors",
    )
    sticky_actions: float | None = Field(
        default=None, ge=0, lt=1, description="probability that the last action is taken again; None: environment's own"
    )
    reward_sign: bool = Field(default=False, description="learn from the rewards' signs")
    reward_scale: float = Field(default=1.0, gt=0, description="learn from rewards times this (after the sign)")
    reward_clip: tuple[float, float] | None = Field(
        default=None, description="lowest and highest reward to learn from (after the scale); None: no limits"
    )
    atari: AtariConfig = AtariConfig()
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=0,
        description="worker processes per rank that step environments; 0: none, auto: as many as pay",
    )
    timeout: float = Field(
        default=60.0, gt=0, le=10**8, description="seconds an environment may take for a step or a reset"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_id(cls, value: Any) -> Any:
        value = {"id": value} if isinstance(value, str) else value
        short = value.get("id") if isinstance(value, dict) else None
        return {**value, "id": SHORT_IDS[short]} if isinstance(short, str) and short in SHORT_IDS else value

    @property
    def jax_only(self) -> bool:
        """Whether only JAX can step it: because of its id, or because ``backend`` is jax."""
        return self.backend == "jax" or self.id.startswith(JAX_FAMILIES)

    @model_validator(mode="after")
    def _fitting(self) -> EnvConfig:
        if self.jax_only and self.backend not in ("auto", "jax"):
            raise ValueError(f"env.backend: {self.backend}, but {self.id} is an environment of JAX's; leave it out")
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError(f"env.reward_clip: {list(self.reward_clip)}: the first must be below the second")
        if self.atari.enabled and self.frame_skip > 1:
            raise ValueError(f"env.frame_skip: {self.frame_skip} with env.atari; give env.atari.frame_skip instead")
        repeats = self.frame_skip > 1 or self.sticky_actions
        if self.action_mask and repeats:
            raise ValueError(
                "env.action_mask: frame_skip and sticky_actions would repeat actions that aren't allowed any more; "
                "leave them out"
            )
        return self


class ImageConfig(Section):
    """Convolutions for image observations."""

    kind: Literal["auto", "nature", "impala", "simple", "residual"] = Field(
        default="auto",
        description="nature (Mnih et al. 2015), impala (Espeholt et al. 2018), simple (3x3 at full resolution, for "
        "small grids), residual (likewise, in residual blocks); auto: nature from 36 pixels on, else simple",
    )
    width: float = Field(default=1.0, gt=0, description="channels and features are multiplied by it")
    depth: int = Field(
        default=2, ge=1, le=MOST_LAYERS, description="residual blocks (impala: per stage) or layers (simple)"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class NetworkConfig(Section):
    """Actor and critic: image encoder, recurrent core, hidden layers, head; what isn't needed is left out."""

    hidden_sizes: tuple[Annotated[int, Field(le=MOST_UNITS)], ...] = Field(
        default=(64, 64), description="units of each hidden layer, of actor and critic"
    )
    activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = Field(
        default="tanh", description="after each hidden layer"
    )
    shared: bool = Field(default=False, description="actor and critic share all but their heads")
    log_std_init: float = Field(default=0.0, description="initial log standard deviation of continuous actions")
    state_dependent_std: bool = Field(
        default=False, description="the actor gives the standard deviation too, instead of one parameter per component"
    )
    squash: bool = Field(
        default=False, description="tanh squashes continuous actions into their bounds; else they are clipped"
    )
    image: ImageConfig = ImageConfig()
    remat: bool = Field(
        default=False, description="jax: compute activations again in the backward pass instead of keeping them"
    )
    recurrent: Literal["lstm", "gru"] | None = Field(
        default=None, description="recurrent core before the hidden layers"
    )
    recurrent_size: int = Field(default=128, ge=1, le=MOST_UNITS, description="units of the recurrent core")
    sequence_length: int | None = Field(
        default=None,
        ge=1,
        description="steps through which gradients flow back; divides num_steps (default: its largest such, up to 32)",
    )
    custom: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:[\w.]+$",
        description="a torch.nn.Module (engine jax: an equinox.Module) in place of all this, as 'module:Class'; see "
        "docs/networks.md",
    )
    custom_kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the custom module, as JSON")


class NormalizeConfig(Section):
    """Running normalisation; its statistics are frozen during an iteration."""

    observations: bool = Field(default=False, description="to zero mean and unit variance")
    returns: bool = Field(
        default=False, description="rewards divided by the standard deviation of the discounted return"
    )
    clip_observations: float = Field(default=10.0, gt=0, description="limit of a normalised observation's components")
    clip_rewards: float = Field(default=10.0, gt=0, description="limit of a normalised reward")


class CheckpointConfig(Section):
    """Checkpoints."""

    interval: int = Field(
        default=50, ge=0, description="iterations between checkpoints; 0: only at the end, and see keep_best"
    )
    seconds: float | None = Field(
        default=None, gt=0, description="also one where so many seconds have passed since the last"
    )
    keep_last: int = Field(
        default=3,
        ge=1,
        description="newest checkpoints to keep, and as many of the newest that weren't due to a stop or the clock",
    )
    keep_best: bool = Field(
        default=True,
        description="keep the checkpoint with the best return as well: of an evaluation, after which one is then saved"
        " if it is the best so far, or in a run without any of the last episodes",
    )
    mirror: str | None = Field(
        default=None,
        description="also copy the run to this place/NAME, of anything that fsspec knows: s3://bucket/runs",
    )
    replay_limit: int = Field(
        default=10_000, ge=0, description="longest live episode, in steps, that is restored by replaying it"
    )

    @field_validator("mirror")
    @classmethod
    def _url(cls, place: str | None) -> str | None:
        if place is not None and not is_url(place):
            shown = HIDDEN if "@" in place or "?" in place else repr(place)  # it may hold a password
            raise ValueError(f"{shown}: a place that fsspec knows is wanted, e.g. s3://bucket/runs")
        return place


class EvalConfig(Section):
    """Evaluation during training."""

    interval: int = Field(default=0, ge=0, description="iterations between evaluations; 0: none")
    episodes: int = Field(
        default=16, ge=1, le=MOST_SIZE, description="episodes of an evaluation, rounded up to a multiple of num_shards"
    )
    max_steps: int = Field(default=10_000, ge=1, description="longer episodes are cut here")
    record_video: bool = Field(
        default=False, description="record an episode of each evaluation as videos/step_<n>.mp4, for trackers too"
    )


SERVICES = ("wandb", "trackio", "mlflow")
"""Trackers that send data to a service, by their keys in ``log``."""


class LogConfig(Section):
    """Trackers; metrics.jsonl and metrics.csv are always written."""

    tensorboard: bool = Field(default=True, description="write TensorBoard event files")
    jsonl: str | None = Field(default=None, min_length=1, description="a second metrics.jsonl at this path")
    console: Literal["short", "full"] = Field(
        default="short", description="full: each iteration's speed, times and losses instead of the state now and then"
    )
    timing: bool = Field(default=False, description="write each rank's times, bytes and memory to timing.jsonl")
    wandb: bool = Field(default=False, description="log to Weights & Biases; WANDB_MODE=offline: to files only")
    trackio: bool = Field(default=False, description="log to Trackio")
    mlflow: bool = Field(default=False, description="log to MLflow; to <runs_dir>/mlflow.db or MLFLOW_TRACKING_URI")
    project: str | None = Field(
        default=None, min_length=1, description="project of W&B and Trackio, experiment of MLflow (default: lockstep)"
    )
    group: str | None = Field(default=None, min_length=1, description="of runs, in W&B, Trackio and MLflow")
    tags: tuple[str, ...] | None = Field(default=None, description="labels in W&B, Trackio and MLflow")
    entity: str | None = Field(default=None, min_length=1, description="W&B user or team")

    @field_validator("jsonl")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        """Makes the path absolute, so that it means the same wherever the run is resumed.

        The working directory's name may hold bytes that Python can't decode. JSON, which passes the config on, has
        no text for those.
        """
        if path is None:
            return None
        whole, encoding = os.path.abspath(os.path.expanduser(path)), sys.getfilesystemencoding()
        if any("\ud800" <= letter <= "\udfff" for letter in whole):
            more = "" if encoding == "utf-8" else ", or set PYTHONUTF8=1"
            raise ValueError(f"{whole!a} isn't text in {encoding}, as a config has to be; give another directory{more}")
        return whole


class ProofConfig(Section):
    """Fingerprints of every parameter and moment, compared across ranks."""

    interval: int = Field(default=10, ge=0, description="iterations between comparisons; 0: only at start and end")
    trace: bool = Field(default=False, description="write each iteration's fingerprints to fingerprints.jsonl")
