"""DeepSpeed's keys that are never translated, and why not.

They are those that DeepSpeed 0.19.8 documents, and those in the examples of DeepSpeed, Hugging Face
and Accelerate; its source knows some more, which no config has. The ones that are translated are in
none of these tables: they are taken from their blocks by name, in `optimizer.py`, `zero.py` and
`options.py`.
"""

from collections.abc import Mapping


def _spread(reasons: Mapping[str, str]) -> dict[str, str]:
    return {key: reason for keys, reason in reasons.items() for key in keys.split()}


_COMMUNICATION = "how devices communicate is decided by XLA, from the shardings"
_PRECISION = "masters, moments and sums of gradients are always float32"
_REPORTS = "what a run logs, prints and measures is up to its loop"
_PARALLEL = "models are divided over devices by a mesh and shardings"
STAY = "parameters stay on the device"
STAGE_3 = "parameters lie where their shardings say"
_NO_CHECK = "the check that it switches off does not exist"
_NO_LOSS_SCALE = "losses are not scaled, which bfloat16 and float32 need not be"
_SAVING = "runs are saved as in docs/checkpoints.md"
_NVME = "what is offloaded lies in host memory, never on a disk"

#: Keys of the whole config that are never translated, and why.
ROOT = _spread(
    {
        "steps_per_print dump_state wall_clock_breakdown memory_breakdown tensorboard wandb "
        "csv_monitor comet comms_logger flops_profiler": _REPORTS,
        "communication_data_type seq_parallel_communication_data_type prescale_gradients "
        "gradient_predivide_factor disable_allgather": _COMMUNICATION,
        "pipeline tensor_parallel expert_parallel sequence_parallel_size": _PARALLEL,
        "data_types": _PRECISION,
        "torch_autocast": "a model computes in the dtype that it was built with",
        "activation_checkpointing": "activations are recomputed where the model says so, by "
        "`jax.checkpoint` or `nnx.remat`",
        "data_efficiency": "the data are up to the loop that feeds the step",
        "checkpoint": _SAVING,
        "managed_gradient_accumulation": "a step is one call of the jitted function",
        "compile": "it concerns the program that PyTorch runs",
        "autotuning": "there is no search for settings",
        "hybrid_engine weight_quantization": "it concerns inference",
        "aio": _NVME,
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": _NO_CHECK,
    }
)

#: The same of `zero_optimization`.
ZERO = _spread(
    {
        "contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions "
        "allgather_bucket_size overlap_comm round_robin_gradients "
        "zero_hpz_partition_size": _COMMUNICATION,
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_module_granularity_threshold memory_efficient_linear "
        "log_trace_cache_warnings": STAGE_3,
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save load_from_fp32_weights "
        "elastic_checkpoint": _SAVING,
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients": (
            "nothing is quantized on its way"
        ),
        "sub_group_size": "the engine chooses the blocks of its updates",
        "ignore_unused_parameters": "every parameter has a gradient in JAX, of zeros if unused",
    }
)

#: The same of `zero_optimization.offload_optimizer`.
OFFLOAD = _spread(
    {
        "nvme_path buffer_count pipeline_read pipeline_write fast_init": _NVME,
        "ratio": "what is offloaded is all but the selected channels",
        "super_offload cpuadam_cores_perc": "there is one way to update on the host",
    }
)

#: All but the first key of `zero_optimization.offload_param`.
OFFLOAD_PARAM = "nvme_path buffer_count buffer_size max_in_cpu pin_memory".split()

#: Of `bf16` and of `fp16`, what is never translated, and why.
BF16 = _spread(
    {
        "immediate_grad_update": "gradients are summed where they arrive",
        "bf16_master_weights_and_grads bf16_optimizer_states": _PRECISION,
    }
)
FP16 = _spread(
    {
        "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis min_loss_scale": _NO_LOSS_SCALE,
        "fp16_master_weights_and_grads": _PRECISION,
    }
)

#: The same of `optimizer.params`.
ADAM = _spread(
    {
        "torch_adam fused": "it says how PyTorch computes the same step",
    }
)

#: What DeepSpeed has had once and now refuses.
REMOVED = (
    "nebula compression_training amp quantize_training sparse_gradients eigenvalue "
    "sparse_attention elasticity graph_harvesting curriculum_learning progressive_layer_drop"
).split()

#: Of these, `false` is what asks for something.
ON_BY_DEFAULT = frozenset(
    "reduce_scatter contiguous_gradients allgather_partitions load_from_fp32_weights "
    "ignore_unused_parameters memory_efficient_linear managed_gradient_accumulation "
    "zero_force_ds_cpu_optimizer".split()
)
