"""What only one of the engines has: settings of the other one are refused in one line, never ignored."""

from __future__ import annotations

from lockstep.config.run import Config, RunOptions


def check_engine(config: Config) -> None:
    """Check that every setting means something to the config's engine.

    Raises:
        ValueError: one line with the key, the value and what to use instead.
    """
    if config.engine == "torch":
        _check_torch(config)
    else:
        _check_jax(config)


def _check_torch(config: Config) -> None:
    if config.env.jax_only:
        raise ValueError(f"env.id: {config.env.id} is stepped by JAX, which engine torch can't do; use --engine jax")
    if config.device == "tpu":
        raise ValueError("device: tpu is for engine jax; use --engine jax, or device cpu or cuda")
    if config.network.remat:
        raise ValueError(
            "network.remat: true is for engine jax; use ppo.gradient_accumulation to save memory, or --engine jax"
        )


def _check_jax(config: Config) -> None:
    if config.compile:
        raise ValueError("compile: true is for engine torch; engine jax compiles the whole iteration anyway")
    if config.cuda_graphs:
        raise ValueError("cuda_graphs: true is for engine torch; engine jax launches an iteration as one program")
    if config.threads != 1:
        raise ValueError(
            f"threads: {config.threads} is for engine torch; engine jax takes more cores as devices: --devices "
            f"{config.threads}"
        )
    if config.backend == "nccl" or (config.backend == "gloo" and config.device != "cpu"):
        raise ValueError(
            f"backend: {config.backend} is for engine torch; XLA chooses by the device, so use backend auto"
        )
    if config.collectives == "shared" and (config.device != "cpu" or config.fsdp):
        what = "fsdp" if config.device == "cpu" else f"device {config.device}"
        raise ValueError(f"collectives: shared, but with {what} devices meet by XLA's own; use collectives auto")
    backend = config.env.backend
    if backend == "envpool":
        raise ValueError(
            "env.backend: envpool is for engine torch; use env.backend auto, with env.workers for slow environments"
        )
    if backend == "tensor":
        raise ValueError(
            "env.backend: tensor is for engine torch; engine jax steps array environments on its devices by itself, "
            "so use env.backend auto"
        )


def check_engine_options(options: RunOptions, config: Config) -> None:
    """Check how the run is to be executed against its engine.

    Raises:
        ValueError: one line with the option, the value and what to use instead.
    """
    if config.engine == "torch":
        _check_torch_options(options)
        return
    if options.nproc == "auto":
        raise ValueError("nproc: auto is for engine torch; in engine jax one process uses every core: leave it out")
    if options.simulate_devices is not None and config.device != "cpu":
        raise ValueError(
            f"simulate_devices: {options.simulate_devices} makes devices of a CPU, and device is {config.device}; use "
            "--devices"
        )
    if options.fsdp_devices is not None and not config.fsdp:
        raise ValueError(f"fsdp_devices: {options.fsdp_devices}, but nothing is sharded; add --fsdp --reduction fast")


def _check_torch_options(options: RunOptions) -> None:
    instead = {
        "devices": "--nproc starts one rank for each device",
        "simulate_devices": "use --nproc",
        "fsdp_devices": "fsdp shards over all ranks",
        "coordinator": "start its ranks with torchrun --nnodes",
    }
    for name, what in instead.items():
        value = getattr(options, name)
        if value is not None:
            raise ValueError(f"{name}: {value} is for engine jax; with engine torch {what}, or add --engine jax")
    if options.num_seeds > 1:
        raise ValueError(
            f"num_seeds: {options.num_seeds} is for engine jax; with engine torch start a run for each --seed, or add "
            "--engine jax"
        )


def check_fsdp_devices(options: RunOptions, devices: int) -> None:
    """Raise a one-line ``ValueError`` unless the fsdp axis divides the ``devices`` of all processes together."""
    wanted = options.fsdp_devices
    if wanted is not None and devices % wanted:
        fits = [n for n in range(1, devices + 1) if devices % n == 0]
        nearest = sorted(sorted(fits, key=lambda n: abs(n - wanted))[:2])
        raise ValueError(
            f"fsdp_devices: {wanted} doesn't divide the run's {devices} devices; nearest that work: "
            f"{' or '.join(map(str, nearest))}"
        )
