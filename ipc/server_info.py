"""What the engine settled on, for whoever asks: limits of requests, devices, kernels, decisions."""

from msgspec import Struct

from .facts import Decision, DeviceProfile, ModelFacts, Phase, PoolingFacts, Resolution


class EngineLimits(Struct, frozen=True, kw_only=True):
    """What a request may ask of the running engine. `pooling`: how it makes vectors, where it does."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    dtype: str
    pooling: PoolingFacts | None = None

    @property
    def generates(self) -> bool:
        """The model makes tokens, whatever else it makes."""
        return self.pooling is None or self.pooling.generates


class ServerInfo(Struct, frozen=True, kw_only=True):
    """What the engine settled on and why."""

    generation: int
    model: ModelFacts | None = None
    limits: EngineLimits | None = None
    devices: tuple[DeviceProfile, ...] = ()
    kernels: tuple[Resolution, ...] = ()
    decisions: tuple[Decision, ...] = ()
    memory: dict[str, int] = {}
    phases: tuple[Phase, ...] = ()
