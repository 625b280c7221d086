"""The GPUs that a plan supports.

Memory is as reported by the driver. Other numbers are from https://www.nvidia.com/en-us/data-center
(/h100, /h200, /a100, /l40s) and the white papers of Ada and GA102, whose tensor cores run at half
their rate with float32 sums. A host's numbers are assumed.
"""

import dataclasses

import jax

_MIB = 2**20
#: Shares of a GPU's peak operations: a usual one, and the best that was measured for full training
#: on an RTX 4090 (SlideFormer 85%; LLMQ, arXiv:2512.15306, 72%).
EFFICIENCY, BEST_EFFICIENCY = 0.4, 0.85


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that a plan needs."""

    name: str  #: The driver's name for the GPU.
    memory: int  #: Bytes.
    bandwidth: float  #: Bytes per second of the GPU's memory.
    flops: float  #: Peak operations per second of bfloat16 matrix products.
    bus: float  #: Bytes per second, each way, to pinned host memory: 0.8 of PCIe's raw rate.
    host_bandwidth: float  #: Bytes per second of host memory per GPU.
    host_memory: int  #: Bytes of host memory per GPU.
    capability: tuple[int, int]  #: CUDA's compute capability.
    cores: int  #: Number of multiprocessors.
    l2_cache: int  #: Bytes.
    core_memory: int  #: Bytes that the threads of one multiprocessor share.

    def host_beside(self, devices: int) -> tuple[float, int]:
        """Returns the assumed bandwidth and memory, in bytes, of a host with `devices` GPUs."""
        if self.host_memory < _SERVER:  # a desktop
            return self.host_bandwidth, self.host_memory
        return self.host_bandwidth * min(devices, 4), self.host_memory * devices

    @property
    def description(self) -> str:
        """Returns XLA's GpuTargetConfig in text form."""
        major, minor = self.capability
        threads = 2048 if major == 9 or minor == 0 else 1536
        fpus = 64 if (major, minor) == (8, 0) else 128
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.cores} clock_rate_ghz: 1.98 fpus_per_core: {fpus}
  device_memory_size: {self.memory} memory_bandwidth: {int(self.bandwidth)}
  l2_cache_size: {self.l2_cache} shared_memory_per_core: {self.core_memory}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.core_memory - 1024}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.name}"
"""


# Bus, host bandwidth and host memory: a server's PCIe 4 or 5, a desktop's PCIe 4.
_SERVER = 256 * 10**9
_SERVER4, _SERVER5 = (25e9, 100e9, _SERVER), (50e9, 100e9, _SERVER)
_PC = (25e9, 50e9, 128 * 10**9)
# Name, MiB, bandwidth, flops, bus and host, capability, cores, MiB of cache, a core's memory.
_FIGURES = {
    "h100": ("NVIDIA H100 80GB HBM3", 81559, 3.35e12, 989e12, _SERVER5, (9, 0), 132, 50, 233472),
    "h200": ("NVIDIA H200", 143771, 4.8e12, 989e12, _SERVER5, (9, 0), 132, 60, 233472),
    "a100": ("NVIDIA A100-SXM4-80GB", 81920, 2.039e12, 312e12, _SERVER4, (8, 0), 108, 40, 167936),
    "l40s": ("NVIDIA L40S", 46068, 864e9, 362e12, _SERVER4, (8, 9), 142, 96, 102400),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24564, 1008e9, 165e12, _PC, (8, 9), 128, 72, 102400),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24576, 936e9, 71e12, _PC, (8, 6), 82, 6, 102400),
}
#: The GPUs that a plan accepts by name.
GPUS = {
    key: Gpu(name, mib * _MIB, rate, flops, bus, reads, host, cuda, cores, l2 * _MIB, core)
    for key, (name, mib, rate, flops, (bus, reads, host), cuda, cores, l2, core) in _FIGURES.items()
}


def gpu_named(device: str | Gpu) -> Gpu:
    """Returns the GPU for a key of `GPUS`, or `device` itself."""
    gpu = GPUS.get(device) if isinstance(device, str) else device
    if gpu is None:
        names = ", ".join(GPUS)
        raise ValueError(f"`device` must be one of {names}, or a `Gpu`, got {device!r}.")
    return gpu


def gpu_here() -> Gpu | None:
    """Returns this machine's GPU, or None if the table lacks it or jax finds no device."""
    try:
        kind = jax.local_devices()[0].device_kind
    # JAX_PLATFORMS=cuda with JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 asserts (jax 0.10.2).
    except (RuntimeError, AssertionError):
        return None
    words = {*kind.lower().replace("-", " ").split()}
    names = {key: {*key.replace("rtx", "rtx ").split()} for key in GPUS}
    fits = [GPUS[key] for key, name in names.items() if name <= words]
    return fits[0] if fits else None
