"""Keys of config.json and their effect on the logits: Transformers' from 4.0 to 5.x, and those of other libraries.

A key is judged by what it can do, in this order:

1. A key that the family reads has its meaning there, and null is always the same as a missing key.
2. A key that cannot change the logits of a text is accepted with any value: who made the file, the tokenizer, training,
   initialisation, losses, outputs besides logits, defaults of generation, other tasks and modalities, layers that guess
   further tokens, and how another library computes or serves. Rules decide where the form of a name is enough
   (`_RULES`), the table `HARMLESS` decides the others.
3. A key that says again what another key says (`SAME_FACT`, `LENGTHS`) is accepted if both agree, and refused if they
   contradict each other: the file does not say then which model it means.
4. A key that is known to change the logits (`CHANGES`) is accepted at the values that have no effect, and refused
   otherwise.
5. Any other key is unknown. It is refused, and the user may have it ignored by name.

A file of a newer model therefore never runs as an older one, and a new key of a trainer costs its user one option.
"""

import re
from collections.abc import Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS_GROUPS: Mapping[str, str] = {
    "where the file comes from": (
        "transformers_version name_or_path pretrained_model_name_or_path model_name_or_path model_type model_name "
        "model_id model_version internal_version config_version version revision commit commit_hash repo_id name "
        "base_model base_models base_model_name base_model_name_or_path original_model parent_model source_model "
        "author authors license language languages description tags library_name pipeline_tag datasets homepage url "
        "citation note notes comment comments date created_at created_by updated_at model_size num_parameters "
        "num_params parameter_count total_params active_params nemo_version torch_version framework is_llama_config "
        "mergekit_version merge_method merge_config mergekit_config"
    ),
    "the tokenizer and its tokens": (
        "tokenizer_class tokenizer_path tokenizer_name tokenizer_name_or_path tokenizer_type tokenizer_config "
        "tokenizer_model_max_length tokenizer_padding_side tokenizer_file auto_tokenizer model_max_length padding_side "
        "truncation_side prefix chat_template bos_token eos_token pad_token unk_token sep_token cls_token mask_token "
        "additional_special_tokens special_tokens add_bos_token add_eos_token add_prefix_space bos_id eos_id pad_id "
        "unk_id eod_id im_start_id im_end_id im_newline_id text_start_id text_end_id mask_init_id padding_idx pad_idx "
        "ignore_index org_vocab_size original_vocab_size vocab_file pad_vocab_size_multiple vocab_size_multiple "
        "pad_vocab_to_multiple_of pad_to_multiple_of make_vocab_size_divisible_by"
    ),
    "training": (
        "pretraining_tp gradient_checkpointing gradient_checkpointing_kwargs use_gradient_checkpointing use_reentrant "
        "neftune_noise_alpha label_smoothing label_smoothing_factor label_smoother learning_rate lr weight_decay "
        "adam_beta1 adam_beta2 adam_epsilon warmup_ratio warmup_steps lr_scheduler_type max_steps max_grad_norm "
        "num_epochs num_train_epochs batch_size train_batch_size per_device_train_batch_size "
        "gradient_accumulation_steps optim optimizer seed random_seed bf16 fp16 tf32 fsdp fsdp_config deepspeed "
        "deepspeed_config zero_stage ddp_find_unused_parameters torch_compile compile use_liger_kernel "
        "sequence_parallel use_sequence_parallel tensor_parallel pipeline_parallel ep_size tp_size pp_size dp_size "
        "layerdrop drop_path_rate seq_aux moe_router_bias_update_rate freeze_backbone freeze_mm_mlp_adapter "
        "tune_mm_mlp_adapter train_from_scratch for_llm_compressor"
    ),
    "the initialisation of weights": (
        "init_method init_std initializer_range initializer_factor init_device init_config weight_init "
        "rescale_prenorm_residual time_step_rank time_step_min time_step_max time_step_floor time_step_scale "
        "time_step_init_scheme dt_min dt_max dt_init dt_scale dt_init_floor mamba_dt_min mamba_dt_max "
        "mamba_dt_init_floor"
    ),
    "outputs of a call besides the logits": (
        "use_cache return_dict use_return_dict return_dict_in_generate output_attentions output_hidden_states "
        "output_scores output_logits output_past output_router_logits num_logits_to_keep logits_to_keep "
        "keys_to_ignore_at_inference"
    ),
    "defaults of generation": (
        "max_length min_length max_new_tokens min_new_tokens max_time do_sample early_stopping num_beams "
        "num_beam_groups diversity_penalty temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff "
        "repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size bad_words_ids force_words_ids num_return_sequences remove_invalid_values "
        "renormalize_logits constraints exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
        "forced_decoder_ids sequence_bias token_healing guidance_scale low_memory watermarking_config stop_strings "
        "penalty_alpha dola_layers cache_implementation cache_config max_cache_len prefill_chunk_size "
        "prompt_lookup_num_tokens max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
        "assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind is_assistant "
        "assistant_ensemble_weight return_legacy_cache stop_token_ids generation_kwargs "
        "speculation_type disable_compile compile_config continuous_batching_config generation_config"
    ),
    "tasks other than causal language modelling, which `architectures` must name": (
        "id2label label2id num_labels num_choices problem_type task_specific_params finetuning_task summary_type "
        "summary_use_proj summary_activation summary_proj_to_labels"
    ),
    "how a library computes the same result": (
        "is_decoder torchscript use_bfloat16 tf_legacy_loss xla_device torch_compile_config chunk_size_feed_forward "
        "use_flash_attn use_flashattn use_flash_attention use_flash_attention_2 flash_attn flash_attention use_sdpa "
        "use_sdpa_attention use_xformers use_memory_efficient_attention memory_efficient_attention fused_add_norm "
        "use_fused_add_norm use_fused_rms_norm use_fused_rmsnorm fused_rms_norm use_fused_rope use_fused_mlp fused_mlp "
        "fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp use_liger optimum_version "
        "use_fast_path use_mamba_kernels use_triton use_kernels use_cuda_graph mamba_ssm_cache_dtype mamba_ssm_dtype "
        "moe_shared_expert_overlap low_cpu_mem_usage device device_map base_model_tp_plan base_model_pp_plan "
        "base_model_ep_plan base_model_fsdp_plan tp_plan is_composition sub_configs"
    ),
    "how a library serves the model": (
        "max_batch_size tensor_parallel_size pipeline_parallel_size tensor_parallel_shards kv_cache_dtype "
        "gpu_memory_utilization num_gpus is_transformers_js"
    ),
    "layers that guess further tokens, which are not run": (
        "num_nextn_predict_layers num_mtp_layers num_mtp_modules use_mtp"
    ),
    "images, sound and their part of the model, which is not run": (
        "multimodal_projector_bias projector_hidden_act projector_hidden_size spatial_merge_size language_model_only "
        "use_mm_proj patch_size media_placeholder_token_id visual boi_token_index eoi_token_index eoa_token_index"
    ),
}
"""Reason -> keys that cannot change the logits of a text."""

HARMLESS: Mapping[str, str] = {
    key: reason for reason, keys in HARMLESS_GROUPS.items() for key in keys.split()
}
"""Key -> reason; the same as `HARMLESS_GROUPS`."""

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"_.*", "private attributes of Transformers"),
        (r".+_token_(id|ids|index|indices)", "the tokenizer and its tokens"),
        (r"(.+_)?(dropout|pdrop)(_(prob|p|rate|ratio))?", "training"),
        (r"dropout_.+", "training"),
        (
            r"(.+_)?loss(es)?(_(coef|coeff|coefficient|alpha|weight|type|scale|factor|fn|function))?",
            "training",
        ),
        (
            r"(.+_)?initializer_(range|factor|std|scale|gain|type)",
            "the initialisation of weights",
        ),
        (
            r"(unsloth|axolotl|trl|llamafactory|wandb|mlc|mlx_lm|mtplx|vllm|sglang|onnx|openvino)_.+",
            "another library's own",
        ),
        (r"transformers[._]js(_.+)?", "another library's own"),
        (r"mtp_.+", "layers that guess further tokens, which are not run"),
        (
            r"(vision|image|audio|video|speech|mm|vit|im)_.+",
            "images, sound and their part of the model, which is not run",
        ),
    )
)
"""(Form of a whole name, reason) of keys that cannot change the logits of a text."""

_ANY_RULE = re.compile("|".join(f"(?:{form.pattern})" for form, _ in _RULES))
_LONGEST = 80
"""Longest key that the rules are tried on; expressions take long for very long ones."""

SAME_FACT: tuple[frozenset[str], ...] = tuple(
    _words(names)
    for names in (
        "head_dim attention_head_dim attn_head_dim kv_channels head_size d_head dim_head size_per_head "
        "hidden_size_per_head",
        "hidden_size n_embd d_model model_dim dim embed_dim",
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers decoder_layers",
        "num_attention_heads n_head n_heads num_heads num_attn_heads num_query_heads",
        "num_key_value_heads num_kv_heads n_kv_heads n_head_kv num_query_groups multi_query_group_num kv_heads",
        "intermediate_size ffn_hidden_size n_inner d_ff ff_dim ffn_dim ffn_size mlp_hidden_size feed_forward_size "
        "intermediate_dim",
        "vocab_size padded_vocab_size n_vocab vocabulary_size",
        "rms_norm_eps layer_norm_epsilon layer_norm_eps layernorm_epsilon norm_eps norm_epsilon rms_norm_epsilon "
        "rmsnorm_eps",
        "rope_theta theta rotary_emb_base rotary_base rope_base rotary_embedding_base",
        "rotary_dim rotary_embedding_dim",
        "use_qk_norm qk_norm qk_layernorm use_qk_layernorm",
        "hidden_act hidden_activation activation activation_function act_fn",
        "sliding_window sliding_window_size sliding_window_length",
        "tie_word_embeddings tie_embeddings tie_embedding tied_embeddings share_embeddings "
        "share_embeddings_and_output_weights",
        "num_experts num_local_experts n_routed_experts num_routed_experts moe_num_experts num_moe_experts n_experts",
        "num_experts_per_tok experts_per_token num_experts_per_token moe_top_k moe_topk router_topk",
        "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts",
        "conv_kernel d_conv mamba_d_conv",
        "state_size ssm_state_size d_state mamba_d_state",
        "n_groups mamba_n_groups mamba_ngroups",
        "expand mamba_expand",
        "chunk_size mamba_chunk_size",
        "use_conv_bias mamba_conv_bias",
        "time_step_limit mamba_dt_limit",
        "layer_types layers_block_type",
    )
)
"""Names of one fact in different libraries and versions; of a family, the first ones that it reads count."""

LENGTHS = _words("n_positions n_ctx max_positions max_position_embedding")
"""Other names of `max_position_embeddings`."""

USED_LENGTHS = _words(
    "seq_length seq_len sequence_length max_sequence_length max_seq_length max_seq_len max_model_len context_length "
    "max_context_length max_context_len context_window context_window_size training_seq_len train_seq_len"
)
"""Lengths of sequences in training and serving; they contradict the file only if its positions do not reach so far."""

_ALIKE = {"swiglu": "silu", "swish": "silu"}
"""Other names of an activation; a gated unit is named after the activation of its gate."""

CHANGES_GROUPS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "biases": {
        "attention_bias qkv_bias use_qkv_bias add_qkv_bias attention_qkv_bias attn_bias attention_out_bias "
        "attention_output_bias o_bias mlp_bias bias use_bias use_biases add_bias_linear lm_head_bias "
        "mamba_proj_bias": (False,),
        "no_bias": (True,),
    },
    "norms": {
        "use_qk_norm qk_norm qk_layernorm use_qk_layernorm use_post_norm post_norm sandwich_norm norm_head "
        "normalize_embedding apply_residual_connection_post_layernorm layernorm_1p": (False,),
        "rmsnorm use_rms_norm use_rmsnorm": (True,),
        "norm_type normalization normalization_type normalization_function layernorm_type": (
            "rms",
            "rmsnorm",
            "rms_norm",
            "RMSNorm",
        ),
    },
    "factors and caps": {
        "embedding_multiplier residual_multiplier logits_scaling logit_scale logits_scale scale_emb embed_scale "
        "embedding_scale width_multiplier lm_head_multiplier": (1.0,),
        "attention_multiplier query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping scale_depth "
        "dim_model_base mup_denominator": (),
        "attn_logit_softcap final_logit_softcap logit_softcapping": (0.0,),
        "scale_embedding scale_embeddings use_mup mup scale_attn_by_inverse_layer_idx": (False,),
    },
    "positions": {
        "partial_rotary_factor rotary_pct rotary_percent rotary_percentage rope_pct rope_percent rope_ratio "
        "rope_condense_ratio rope_scaling_factor rope_factor interpolate_factor position_interpolation_factor "
        "extrapolation_factor rope_alpha": (1.0,),
        "rope_interleaved rope_interleave rope_traditional use_mrope use_dynamic_ntk use_logn_attn alibi use_alibi "
        "use_mem_rope position_embedding_xdrope": (False,),
        "use_rotary_pos_emb use_rope use_rotary": (True,),
        "position_embedding_type": ("rope", "rotary"),
        "rope_type rope_scaling_type": ("default",),
        "no_rope_layers no_rope_layer_interval nope_layer_interval rotary_dim rope_local_base_freq": (),
    },
    "which tokens attention sees": {
        "sliding_window attention_chunk_size sliding_window_pattern dual_chunk_attention_config layer_types "
        "attention_sink_size": (),
        "use_sliding_window use_bidirectional_attention bidirectional prefix_lm use_sparse_attention attention_sinks "
        "use_attention_sinks use_cla": (False,),
        "is_causal causal": (True,),
    },
    "other layers": {
        "is_encoder_decoder add_cross_attention tie_encoder_decoder use_parallel_residual parallel_attn "
        "new_decoder_architecture multi_query multi_query_attention use_mla use_moe is_moe add_classification_head": (
            False,
        ),
        "pruned_heads": ({},),
        "cross_attention_hidden_size cross_attention_layers per_layer_config block_configs": (),
    },
    "experts": {
        "num_experts num_local_experts n_routed_experts num_routed_experts moe_num_experts num_moe_experts n_experts "
        "num_experts_per_tok experts_per_token num_experts_per_token moe_top_k moe_topk router_topk n_shared_experts "
        "num_shared_experts num_shared_expert moe_num_shared_experts shared_expert_intermediate_size "
        "shared_intermediate_size moe_shared_expert_intermediate_size": (0,),
        "router_jitter_noise input_jitter_noise moe_router_logit_softcapping": (0.0,),
        "routed_scaling_factor": (1.0,),
        "mlp_only_layers moe_layers": ([],),
        "moe_drop_tokens": (False,),
        "moe_intermediate_size scoring_func norm_topk_prob first_k_dense_replace": (),
        "decoder_sparse_step moe_layer_freq": (),
    },
}
"""Change in the model -> keys -> their values that have no effect."""

CHANGES: Mapping[str, tuple[str, tuple[object, ...]]] = {
    key: (what, neutral)
    for what, keys in CHANGES_GROUPS.items()
    for names, neutral in keys.items()
    for key in names.split()
}
"""Key that changes the logits -> the change in the model, and its values that have no effect."""

SPECIAL: Mapping[str, str] = {
    "dual_chunk_attention_config": (
        "chooses dual chunk attention, which jaxkv does not have; Transformers ignores it, vLLM applies it. The result "
        "is the same for sequences up to its chunk_size: delete the key from the file to run those"
    ),
    "per_layer_config": "gives layers sizes of their own, which jaxkv has for Gemma 4 alone",
}
"""Key of `CHANGES` -> a message that says more."""

_CODE = {
    "auto_map": "names Python code in the model's directory, and jaxkv runs no code from there; jaxkv's own "
    "implementation is used only if AutoModelForCausalLM names the one class in `architectures`",
    "model_file": "names Python code in the model's directory, and jaxkv runs no code from there",
    "_attn_implementation": "chooses code to run, which a model's directory may not do",
    "attn_implementation": "chooses code to run, which a model's directory may not do",
    "_experts_implementation": "chooses code to run, which a model's directory may not do",
    "experts_implementation": "chooses code to run, which a model's directory may not do",
}
"""Beginning of a key that may name code -> why it is refused then."""

_CODE_BEGINNINGS = tuple(_CODE)

_OWN_IMPLEMENTATIONS = _words(
    "eager sdpa flash_attention_2 flash_attention_3 flash_attention_4 flash_attn flash_attention flex_attention "
    "eager_paged sdpa_paged paged|eager paged|sdpa paged|flash_attention_2 grouped_mm batched_mm deepgemm"
)
"""Transformers' own implementations of attention and experts: all compute the same, so the choice changes nothing."""


def why_harmless(key: str, value: object) -> str | None:
    """Returns why a key cannot change the logits; `None` if it can, or is unknown."""
    if _names_code_by(key) is not None:
        named = tuple(value.values()) if isinstance(value, Mapping) else (value,)
        own = "_implementation" in key and _OWN_IMPLEMENTATIONS.issuperset(
            name if isinstance(name, str) else "" for name in named
        )
        flag = key.endswith("_autoset") and isinstance(value, bool)
        return "how a library computes the same result" if own or flag else None
    if key in HARMLESS:
        return HARMLESS[key]
    if key in CHANGES:
        return None
    if len(key) > _LONGEST or not _ANY_RULE.fullmatch(key):
        return None
    return next(reason for form, reason in _RULES if form.fullmatch(key))


def why_refused_as_code(key: str, value: object) -> str | None:
    """Returns why a key may not be set as it is, if it names code to run; `auto_map` is for the caller to excuse."""
    beginning = _names_code_by(key)
    if beginning is None or value is None or why_harmless(key, value) is not None:
        return None
    return _CODE[beginning]


def is_neutral(key: str, value: object) -> bool:
    """Whether a key of `CHANGES` has a value without effect."""
    return any(value == neutral for neutral in CHANGES[key][1])


def same_value(one: object, other: object) -> bool:
    """Whether two spellings of one fact agree."""
    if isinstance(one, str) and isinstance(other, str):
        return _ALIKE.get(one, one) == _ALIKE.get(other, other)
    return one == other


def _names_code_by(key: str) -> str | None:
    if not key.startswith(_CODE_BEGINNINGS):
        return None
    return next((beginning for beginning in _CODE if key.startswith(beginning)), None)
