"""Names that keys have in other tools: Megatron-LM, torchtitan, NeMo Automodel, transformers' Trainer, peft,
TRL, axolotl, LLaMA-Factory, unsloth, DeepSpeed, nanoGPT, and what people say.

Two tables, each by its answer: names of what there is here under another key, and names of what there is not.
A dotted name goes before its last part: ``zero_optimization.stage`` is not ``stage``.
"""

from __future__ import annotations

_RECOMPUTE = 'memory.recompute = ["layer"]'
_BUILT_IN = "train.kernels (fused kernels are built in, and used where they can run: leave it out)"
_STEPS = "train.steps (a run is counted in steps)"
_ACCUMULATED = (
    "train.global_batch_size (rows a step: train.micro_batch_size x data-parallel ranks x accumulated "
    "micro-batches)"
)
_BALANCE = "experts.balance.micro_batch (or experts.balance.sequence, experts.balance.global_batch)"
_HELD_OUT = "data.holdout (a share of the documents of data.path is held out)"

_MEANT = {
    # The model.
    "model.hf": """
        model model_name_or_path model_path hf_path base_model pretrained_model_name_or_path model_name
        model_id hf_model hf_model_id hf_assets_path initial_load_path pretrained_checkpoint
        pretrained_model_path base_model_name_or_path base_model_config model_dir hf_checkpoint
        from_pretrained model_config initial_load_in_hf hf_model_path pretrained_path tokenizer_and_model""",
    "model.preset": "flavor model_flavor model_size model.name model_provider",
    "model.random_weights = true (with model.hf)": """
        reinit_weights init_from_scratch from_scratch random_init""",
    "model.architecture": "model_type architectures model_architecture arch",
    "model.num_hidden_layers": "n_layers n_layer num_layers depth num_decoder_layers",
    "model.hidden_size": "d_model dim n_embd embed_dim model_dim hidden_dim embedding_size width",
    "model.num_attention_heads": "n_heads n_head num_heads",
    "model.num_key_value_heads": "n_kv_heads num_query_groups num_kv_heads n_kv_head num_key_value_groups",
    "model.head_dim": "kv_channels dim_head d_head",
    "model.intermediate_size": "ffn_hidden_size d_ff ffn_dim inter_dim mlp_dim",
    "model.moe_intermediate_size": """
        moe_ffn_hidden_size moe_inter_dim moe_hidden_dim expert_hidden_dim expert_hidden_size
        expert_intermediate_size""",
    "model.num_experts": """
        n_experts num_local_experts n_routed_experts num_moe_experts num_routed_experts experts_num
        total_experts moe_num_experts""",
    "model.num_experts_per_tok": """
        top_k topk moe_router_topk moe_topk experts_per_token experts_per_tok num_experts_per_token
        router_topk router_top_k n_activated_experts num_selected_experts moe_top_k active_experts""",
    "model.n_shared_experts (each of model.moe_intermediate_size)": """
        num_shared_experts moe_shared_expert_intermediate_size shared_expert_intermediate_size
        moe_shared_experts""",
    "model.shared_expert_gate": "moe_shared_expert_gate",
    "model.first_k_dense_replace": """
        moe_layer_freq n_dense_layers num_dense_layers first_dense_layers interleave_moe_layer_step
        moe_layer_start_index decoder_sparse_step mlp_only_layers""",
    "model.n_group": "moe_router_num_groups n_expert_groups num_expert_groups",
    "model.topk_group": "moe_router_group_topk n_limited_groups num_limited_groups",
    "model.routed_scaling_factor": "moe_router_topk_scaling_factor route_scale router_scaling_factor",
    "model.norm_topk_prob": "route_norm moe_router_pre_softmax norm_topk norm_topk_probs",
    "model.num_nextn_predict_layers": "mtp_num_layers num_mtp_layers mtp_layers num_mtp_modules mtp_depth",
    "model.mtp_loss_coef": "mtp_loss_scaling_factor mtp_loss_weight mtp_loss_coeff",
    "model.rms_norm_eps": "norm_epsilon layernorm_epsilon norm_eps layer_norm_epsilon layer_norm_eps",
    "model.rope_theta": "rotary_base rope_base rope_freq_base",
    "model.partial_rotary_factor": "rotary_percent",
    "model.max_position_embeddings": "max_position_embedding original_seq_len n_positions",
    "model.rope.type (and model.rope.factor)": """
        rope_scaling rope_type rope_scaling_type use_rope_scaling position_embedding_type""",
    "model.rope.factor": """
        rope_scaling_factor rope_factor rotary_scaling_factor yarn_factor
        rotary_seq_len_interpolation_factor""",
    "model.tie_word_embeddings": """
        untie_embeddings_and_output_weights weight_tying enable_weight_tying tie_embeddings tie_weights
        share_embeddings_and_output_weights""",
    "model.initializer_range": "init_method_std init_std initialiser_range",
    "model.vocab_size": """
        padded_vocab_size make_vocab_size_divisible_by vocab n_vocab resize_token_embeddings""",
    "model.use_qk_norm": "qk_layernorm qk_norm",
    "model.attention_bias": "add_qkv_bias qkv_bias add_bias_linear disable_bias_linear",
    "model.sliding_window": "window_size attention_window",
    "model.qk_nope_head_dim": "qk_head_dim",
    "model.qk_rope_head_dim": "qk_pos_emb_head_dim",
    # Adapters and preferences.
    "adapter.rank": """
        lora_rank lora_r lora_dim lora.r lora.rank lora.dim peft.dim peft.r peft.rank peft_config.r r
        lora_config.r adapter.r adapter.dim adapter_dim network_dim""",
    "adapter.alpha": "lora_alpha lora.alpha peft.alpha",
    "adapter.dropout": "lora_dropout lora.dropout peft.dropout",
    "adapter.target_modules": """
        lora_target_modules lora_target lora_modules lora_target_linear match_all_linear exclude_modules
        finetune_attention_modules finetune_language_layers finetune_mlp_modules lora_layers""",
    "adapter.target_parameters": "lora_target_parameters",
    'adapter.kind = "dora"': "use_dora dora peft_use_dora lora_use_dora",
    "adapter.rank (0, the default, trains the whole model)": "full_finetuning full_finetune",
    "adapter.kind (and adapter.rank)": """
        adapter finetuning_type peft_type use_peft peft_method peft_scheme use_lora lora peft""",
    "adapter.freeze_base": "freeze_backbone train_base_model freeze_base_model",
    "preference.beta": "beta dpo_beta pref_beta rl_beta",
    "preference.loss": "preference loss_type pref_loss dpo_loss_type",
    'data.kind = "preference" (DPO)': "rl dpo preference_dataset",
    # Ranks.
    "mesh.dp_shard": """
        dp data_parallel data_parallel_size data_parallel_shard_degree dp_size fsdp_size dp_shard_size
        fsdp_degree dp_shard_degree""",
    "mesh.dp_outer": """
        data_parallel_replicate_degree dp_replicate dp_replicate_size dp_replicate_degree hsdp
        num_distributed_optimizer_instances replicas zero_hpz_partition_size""",
    "mesh.cp": """
        context_parallel context_parallel_size context_parallel_degree cp_size cp_degree
        sequence_parallel_size sequence_parallel_degree ulysses_degree ulysses_sequence_parallel_size
        context_parallel_world_size ring_attention_size""",
    "mesh.tp": """
        tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size
        tp_degree model_parallel_size""",
    "mesh.ep": """
        expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size
        ep_degree moe_expert_parallel_size expert_parallelism""",
    "mesh.etp": "expert_tensor_parallel_size expert_tensor_parallel_degree etp_size moe_tp_size",
    "mesh.elastic": "elasticity elastic fault_tolerance",
    "mesh.ep and mesh.tp": "mesh device_mesh mesh_shape parallel_dims",
    "context_parallel.mode": """
        cp_comm_type context_parallel_rotate_method ring_attn_func context_parallel_mode cp_mode
        context_parallel_rotate""",
    # Experts.
    "experts.dispatcher": """
        moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep token_dispatcher
        expert_parallel_comm_backend enable_deepep moe_dispatcher moe_token_dispatcher all2all_backend""",
    'experts.compute ("grouped" is the default: leave it out)': """
        moe_grouped_gemm grouped_gemm grouped_mm use_grouped_mm experts_implementation moe_implementation
        moe_use_grouped_gemm moe_backend""",
    "experts.sub_batches (or experts.chunks)": """
        overlap_moe_expert_parallel_comm moe_overlap ep_overlap_early_attn_memory_release
        delay_wgrad_compute moe_shared_expert_overlap""",
    'experts.selection = "forced_balance" (for benchmarks)': """
        moe_router_force_load_balancing debug_force_load_balance force_load_balance fake_balanced_gate
        moe_router_force_biased""",
    f"{_BALANCE}": """
        moe_aux_loss_coeff aux_loss_coef aux_loss_coeff aux_loss_alpha moe_aux_loss router_aux_loss_coef
        aux_loss_weight load_balancing_loss_coef load_balance_loss_weight moe_loss_coeff
        router_aux_loss_coeff aux_loss""",
    "experts.balance.micro_batch (aux_loss; or experts.balance.sequence for seq_aux_loss, "
    "experts.balance.global_batch for global_aux_loss, experts.balance.bias_rate without a loss)": """
        moe_router_load_balancing_type router_load_balancing_type load_balancing_type moe_load_balancing
        load_balancing""",
    "experts.balance.bias_rate": """
        moe_router_bias_update_rate moe_router_enable_expert_bias load_balance_coeff bias_update_rate
        gate_bias_update_factor expert_bias_update_rate bias_update_speed""",
    "experts.balance.z_loss": "moe_z_loss_coeff router_z_loss_coef z_loss_coeff z_loss_weight moe_z_loss",
    "experts.capacity.factor": """
        moe_expert_capacity_factor expert_capacity_factor capacity_factor moe_capacity_factor drop_tokens
        moe_token_dropping expert_capacity eval_capacity_factor min_capacity""",
    "experts.capacity.pad_to_max": "moe_pad_expert_input_to_capacity pad_expert_input_to_capacity",
    "experts.capacity.policy": "moe_token_drop_policy token_drop_policy",
    "experts.replay": "moe_enable_routing_replay router_replay routing_replay use_rollout_routing_replay",
    # Sharding and memory.
    "fsdp.shard": """
        sharding_strategy fsdp_sharding_strategy data_parallel_sharding_strategy fsdp fsdp_version
        fsdp_mode use_megatron_fsdp use_torch_fsdp2 use_custom_fsdp""",
    'fsdp.shard = "params", "grads" or "optimizer" (ZeRO 3, 2, 1)': """
        zero_stage zero_optimization zero_optimization.stage zero3 zero2 zero zero_3 zero_2""",
    'fsdp.shard ("params", the default, shards the optimizer too)': """
        use_distributed_optimizer distributed_optimizer use_zero_redundancy_optimizer""",
    'fsdp.shard ("params", "grads" or "optimizer": ZeRO 3, 2, 1), or data.kind for the stage of a training '
    '("chat" for sft, "text" for pt, "preference" for dpo)': "stage",
    "fsdp.reshard_after_forward": "fsdp_reshard_after_forward fsdp_reshard_after_forward_policy",
    "fsdp.cpu_offload": """
        offload enable_cpu_offload fsdp_offload_params offload_params fsdp_cpu_offload offload_policy
        cpu_offload_params zero_optimization.offload_param offload_param fsdp_cpu_ram_efficient_loading""",
    "fsdp.cpu_offload = true, or optim.state_offload for the moments alone": """
        offload_optimizer zero_optimization.offload_optimizer optimizer_cpu_offload cpu_optimizer
        optimizer_offload offload_optimizer_device""",
    "fsdp.prefetch (on by default: leave it out)": """
        overlap_param_gather fsdp_forward_prefetch backward_prefetch fsdp_backward_prefetch
        forward_prefetch stage3_prefetch_bucket_size fsdp_backward_prefetch_policy defer_fsdp_grad_sync""",
    "fsdp.units": """
        fsdp_transformer_layer_cls_to_wrap fsdp_auto_wrap_policy auto_wrap_policy wrap_policy
        transformer_layer_cls_to_wrap fsdp_min_num_params no_split_modules zero3_leaf_modules""",
    "fsdp.register_buffers": "nccl_ub use_nccl_ub fsdp_double_buffer",
    _RECOMPUTE: """
        gradient_checkpointing checkpointing activation_checkpointing activation_checkpoint
        checkpoint_activations enable_gradient_checkpointing use_gradient_checkpointing memory.mode
        activation_checkpoint.mode gradient_checkpointing_kwargs ac_mode ac disable_gradient_checkpointing
        recompute_method enable_activation_checkpointing remat fsdp_activation_checkpointing
        full_recompute""",
    f'{_RECOMPUTE} (full), or parts of a layer, ["norms", "experts"] say (selective)': """
        recompute recompute_granularity recompute_activations recompute_modules moe_layer_recompute
        selective_ac_option selective_ac per_op_sac_force_recompute_mm_shapes_by_fqns recompute_layers""",
    "memory.layers": "recompute_num_layers num_layers_to_recompute",
    "memory.offload": """
        cpu_offloading activation_offloading fine_grained_activation_offloading offload_modules
        activation_offload activations_offload cpu_offloading_num_layers cpu_checkpointing
        activation_cpu_offload""",
    # Precision.
    "precision.param_dtype": """
        dtype torch_dtype mixed_precision precision mixed_precision_param params_dtype amp autocast
        compute_dtype bnb_4bit_compute_dtype data_type mixed_precision_policy mp_policy model_dtype
        half_precision_backend""",
    'precision.param_dtype = "bfloat16"': "bf16 pure_bf16 bfloat16 bf16_full_eval",
    'precision.param_dtype = "float16"': "fp16 float16 fp16_full_eval",
    'precision.param_dtype = "float32"': "fp32 float32 tf32",
    "precision.reduce_dtype": """
        mixed_precision_reduce grad_reduce_in_fp32 grad_reduce_in_bf16 communication_data_type
        accumulate_allreduce_grads_in_fp32 allreduce_dtype""",
    "precision.main_dtype": """
        main_params_dtype master_weights master_dtype fp32_master_weights master_weight_dtype""",
    "precision.grad_dtype": "main_grads_dtype grad_accum_dtype gradient_accumulation_dtype",
    'precision.recipe = "fp8_blockwise"': """
        model.converters converters fp8 fp8_format fp8_recipe float8 enable_fp8 fp8_hybrid fp8_training
        recipe_name float8_recipe_name quantize fp8.enabled te_precision fp8_e4m3 linear_fp8""",
    'precision.recipe = "mxfp8"': "mx mxfp8",
    'precision.recipe = "nvfp4"': "fp4 fp4_format fp4_recipe",
    "precision.quantized_weights": """
        fp8_param_gather enable_fsdp_float8_all_gather fp8_param fp8_primary_weights""",
    "precision.keep_first_layers": "first_last_layers_bf16 num_layers_at_start_in_bf16",
    "precision.keep_last_layers": "num_layers_at_end_in_bf16",
    "precision.keep": "filter_fqns fp8_exclude_modules",
    "precision.emulate": "emulate_fp8",
    'precision.frozen_dtype = "nf4" (with adapter.rank)': """
        load_in_4bit quantization_bit quantization_config bnb_4bit_quant_type bnb_4bit_use_double_quant
        qlora bnb_config_kwargs quantization_method use_qlora bnb_4bit_quant_storage bnb_4bit""",
    'precision.frozen_dtype = "float8" (with adapter.rank)': "load_in_8bit load_in_fp8",
    "precision.qat": "qat_type enable_qat fake_quant quantization_aware_training",
    "precision.loss_scale.initial": "loss_scale initial_loss_scale initial_scale_power",
    "precision.loss_scale.growth_interval": "loss_scale_window",
    "precision.loss_scale.minimum": "min_loss_scale",
    # The optimizer.
    "optim.name": "optimizer optim optim_type optimizer_name optimizer_type optimizer.type optimizer.name",
    "optim.lr": "lr learning_rate max_lr base_lr peak_lr init_lr lr_rate warmup_max_lr",
    "optim.min_lr_ratio (a fraction of optim.lr)": """
        min_lr lr_min min_lr_factor cosine_min_lr_ratio min_lr_rate eta_min warmup_min_lr final_lr lr_end
        min_learning_rate cos_min_ratio""",
    "optim.weight_decay": "wd start_weight_decay end_weight_decay l2_regularization",
    "optim.beta1 and optim.beta2": "betas adam_betas optim_betas",
    "optim.beta1": "adam_beta1 beta_1 b1 momentum",
    "optim.beta2": "adam_beta2 beta_2 b2",
    "optim.eps": "adam_eps adam_epsilon epsilon optim_eps",
    "optim.schedule": """
        lr_scheduler_type scheduler lr_decay_style lr_schedule decay_type lr_scheduler scheduler_type
        lr_scheduler_kwargs scheduler.type lr_policy lr_decay_type lr_scheduler.name""",
    "optim.warmup_steps": """
        warmup lr_warmup_iters lr_warmup_steps warmup_iters num_warmup_steps warmup_num_steps lr_warmup""",
    "optim.warmup_steps (a number of steps)": """
        warmup_ratio lr_warmup_fraction warmup_fraction lr_warmup_samples warmup_percent warmup_tokens""",
    "optim.decay_fraction (of all steps; with optim.schedule = \"wsd\")": """
        decay_ratio lr_wsd_decay_iters lr_wsd_decay_samples decay_steps lr_wsd_decay_style cooldown
        cooldown_steps""",
    "optim.grad_clip": """
        max_grad_norm clip_grad max_norm gradient_clipping gradient_clip_val grad_norm clip_grad_norm
        grad_clip_norm gradient_clip max_gradient_norm clip_norm""",
    "optim.moment_dtype": "use_precision_aware_optimizer optimizer_state_dtype optim_bits adam_8bit",
    "optim.first_moment_dtype": "exp_avg_dtype",
    "optim.second_moment_dtype": "exp_avg_sq_dtype",
    "optim.state_offload": "optimizer_offload_fraction",
    "optim.ema.decay": "ema_decay use_ema ema ema_alpha",
    "optim.groups": """
        param_groups lr_mult decoupled_lr embedding_lr loraplus_lr_ratio loraplus_lr_embedding lr_groups
        embedding_learning_rate layerwise_lr no_weight_decay_cond no_decay""",
    "optim.muon.momentum": "muon_momentum",
    "optim.muon.ns_steps": "muon_num_ns_steps muon_ns_steps newton_schulz_steps",
    "optim.qk_clip": "qk_clip_threshold qk_clip_alpha",
    # Data.
    "data.path": """
        data data_path dataset_path train_data_path data_files train_file data_dir train_data train_files
        dataset_dir train_path data_prefix train_dataset_path file_name dataset_file""",
    "data.dataset": """
        dataset dataset_name dataset_id path_or_dataset_id hf_dataset path_or_dataset train_dataset""",
    "data.sources (a table [[data.sources]] with kind and path for each)": """
        datasets train_datasets data_mixture data_blend dataset_mixture dataset_prob interleave_probs
        blend mix_strategy dataset_weights data_args_path per_split_data_args_path mixture
        pretraining_dataset""",
    "data.kind": "dataset_type data_format dataset_format ds_type dataset_kind datasets.type",
    'data.kind = "python-stdlib"': "mock_data synthetic_data dummy_data",
    "data.subset": "dataset_config dataset_config_name dataset_subset",
    "data.split": "dataset_split dataset_train_split train_split",
    _HELD_OUT: """
        val_split split val_set_size val_size eval_split test_size validation_split eval_dataset
        valid_data_path validation_file eval_file test_datasets validation_dataset test_data_path
        eval_ratio val_data validation_data eval_data_path val_files""",
    "data.field": """
        text_field text_column dataset_text_field content_key messages_column field_messages text_key
        json_keys field_instruction column_mapping""",
    "data.max_bytes": "max_samples max_train_samples max_examples num_samples limit_train_samples",
    "data.document_end": "eod_token_id",
    "data.eos_token": "append_eod add_eos_token eos",
    "data.bos_token": "add_bos_token prepend_bos bos",
    "data.tokenizer": """
        tokenizer_path tokenizer_model tokenizer_name_or_path tokenizer_config tokenizer_type
        tokenizer_name vocab_file merge_file processor tokenizer.path
        tokenizer.pretrained_model_name_or_path tokenizer.name tokenizer_id tokenizer_dir""",
    "data.seq_len": """
        max_length max_seq_len max_seq_length seq_length sequence_length block_size context_length
        cutoff_len sequence_len model_max_length encoder_seq_length max_context_length max_sequence_length
        n_ctx decoder_seq_length max_prompt_length max_source_length max_token_len seqlen""",
    "data.pack": """
        packing sample_packing pack_sequences packed_sequence_size neat_packing pack_to_max_length
        eval_sample_packing pad_to_sequence_len pad_to_max_length packing_strategy eval_packing
        use_packed_sequence packed_sequence pad_samples_to_global_batch_size""",
    "data.chat_template": "template chat_template_jinja conversation_template chat_template_path",
    "data.chat_loss_roles": """
        train_on_inputs roles_to_train train_on_prompt mask_history assistant_only_loss
        completion_only_loss train_on_responses_only answer_only_loss train_on_completions_only
        mask_prompt""",
    "data.shuffle": "shuffle_dataset dataloader_type sampler shuffle_merged_datasets dataset_shuffle",
    "data.num_workers": """
        dataloader_num_workers num_proc dataset_num_proc preprocessing_num_workers dataset_processes
        workers num_data_workers""",
    "data.prefetch": "dataloader_prefetch_factor prefetch_factor",
    "data.pin_memory": "dataloader_pin_memory",
    "data.cache_dir": "dataset_prepared_path data_cache_path tokenized_path data_cache_dir",
    # Checkpoints.
    "checkpoint.interval": """
        save_interval save_steps ckpt_every_steps checkpoint_interval save_freq save_every saves_per_epoch
        ckpt_interval save_strategy checkpoint_every save_every_n_steps every_n_train_steps
        checkpoint_freq persistent_save_interval checkpoint_steps save_n_steps""",
    "checkpoint.interval (-1 saves nothing)": "checkpoint.enable checkpoint.enabled enable_checkpoint",
    "checkpoint.in_memory": "non_persistent_save_interval non_persistent_ckpt_type in_memory_checkpoint",
    "checkpoint.keep_last": """
        save_total_limit keep_latest_k save_top_k keep_checkpoints keep_last_n max_checkpoints
        most_recent_k keep_last_k""",
    "checkpoint.folder (or train.output_dir, for all that a run writes)": """
        save checkpoint_dir ckpt_dir checkpoint_path ckpt_folder checkpoint_folder""",
    "checkpoint.load (the folder step_... of that step)": "ckpt_step load_step checkpoint.load_step",
    "checkpoint.load": """
        lora_model_dir adapter_name_or_path load_path resume_from init_from restore_from ckpt_path
        load_dir load_checkpoint load_from resume_path initial_checkpoint""",
    "checkpoint.load (or --resume with the folder of a run)": """
        resume_from_checkpoint resume_run auto_resume_from_checkpoints auto_resume resume_training resume""",
    "checkpoint.load_only_model = true": """
        finetune no_load_optim no_load_rng exclude_from_loading load_weights_only reset_optimizer
        initial_load_model_only load_optimizer_states load_module_only reset_iteration""",
    "checkpoint.asynchronous": "async_save async_mode async_checkpoint async_checkpointing use_async_save",
    "checkpoint.threads": "ckpt_fully_parallel_save ckpt_parallel_save",
    # What is seen of a run, and its health.
    "observe.log_interval": """
        logging_steps log_freq log_every log_every_n_steps log_every_steps print_freq steps_per_print
        logging_interval logging_strategy log_steps print_interval remote_every_steps""",
    "observe.tensorboard (it is written into <run folder>/tensorboard)": """
        tensorboard_dir enable_tensorboard use_tensorboard tensorboard_log_dir logging_dir save_tb_folder
        tensorboard_queue_size""",
    'observe.loggers = ["wandb"]': "wandb use_wandb enable_wandb wandb_log wandb_mode log_with_wandb",
    'observe.loggers = ["mlflow"]': "mlflow mlflow_tracking_uri use_mlflow",
    "observe.tensorboard": "tensorboard.enabled tensorboard.enable",
    "observe.loggers": "report_to logger log_with trackers",
    'observe.project (with observe.loggers = ["wandb"])': """
        wandb_project project project_name mlflow_experiment mlflow_experiment_name wandb.project""",
    "train.output_dir (its last part names the run)": """
        wandb_name run_name wandb_exp_name wandb_run_name exp_name experiment_name wandb_run_id job_name
        wandb.name""",
    "observe.profile": """
        enable_profiling profiler use_pytorch_profiler profile_freq profiler_steps flops_profiler
        profiling pytorch_profiler""",
    "observe.profile_start": "profile_step_start",
    "observe.profile_steps": "profile_step_end profiler_active",
    "observe.ranges": "nvtx nvtx_ranges nsys enable_nvtx",
    "observe.prometheus": "metrics_port prometheus_port",
    "health.hang_seconds": """
        distributed_timeout_minutes ddp_timeout init_timeout_seconds train_timeout_seconds nccl_timeout
        timeout_minutes distributed_timeout timeout comm_timeout trace_buf_size""",
    "health.step_times": "log_straggler straggler_detection straggler",
    "health.gc_interval": """
        manual_gc manual_gc_interval gc_freq torch_empty_cache_steps gc_steps
        garbage_collection_every_n_steps""",
    "health.on_spike": "spike_detection loss_spike rerun_mode skip_loss_spikes",
    "health.checksums": "check_weight_hash_across_dp_replicas_interval",
    "health.bind_cores": "numa numa_binding cpu_affinity use_cpu_affinity",
    # The run.
    "train.steps": """
        max_steps train_iters max_iters iterations total_steps num_steps train_samples training_steps
        n_steps max_train_steps total_training_steps num_iterations iters max_iterations exit_interval
        train_steps num_train_steps num_training_steps""",
    _STEPS: "epochs num_train_epochs num_epochs n_epochs epoch max_epochs total_epochs train_tokens",
    "train.global_batch_size": "batch_size train_batch_size bs total_batch_size global_bs gbs",
    _ACCUMULATED: """
        gradient_accumulation_steps grad_accum grad_accum_steps gradient_accumulation
        accumulate_grad_batches grad_acc_steps accumulation_steps num_microbatches ga_steps""",
    "train.micro_batch_size": """
        local_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu mbs micro_bs
        device_batch_size per_gpu_batch_size microbatch_size batch_size_per_device
        micro_batch_size_per_gpu per_gpu_train_batch_size""",
    "train.micro_batch_size (an evaluation takes the same)": """
        per_device_eval_batch_size eval_batch_size val_batch_size eval_micro_batch_size""",
    "train.output_dir": """
        out_dir save_dir output_path dump_folder log_dir results_dir default_root_dir run_dir work_dir
        output_folder workdir save_folder""",
    "train.seed": "random_state random_seed manual_seed set_seed data_seed rng_seed sampler_seed",
    "train.deterministic": """
        deterministic_mode full_determinism use_deterministic_algorithms cudnn_deterministic
        deterministic_algorithms batch_invariant""",
    "train.eval_interval": """
        eval_steps eval_freq val_every_steps eval_every evaluation_strategy eval_strategy evals_per_epoch
        val_check_interval do_eval val_interval validate_every validation.freq test_freq eval_delay
        validation.enable eval_on_start""",
    "train.eval_batches": """
        eval_iters validation.steps max_eval_samples limit_val_batches eval_max_batches val_batches""",
    _BUILT_IN: """
        compile torch_compile torchcompile enable_compile compile.enable use_liger_kernel liger_kernel
        transformer_impl apply_rope_fusion bias_swiglu_fusion masked_softmax_fusion
        cross_entropy_loss_fusion gradient_accumulation_fusion moe_permute_fusion moe_router_fusion
        persist_layer_norm bias_activation_fusion bias_dropout_fusion liger_fused_linear_cross_entropy
        liger_rms_norm liger_glu_activation liger_rope use_te enable_liger_kernel rope_fusion
        cross_entropy_fusion_impl torch_compile_backend torch_compile_mode use_triton_kernels
        fused_linear_cross_entropy use_transformer_engine""",
    "train.graphs": """
        cuda_graph enable_cuda_graph external_cuda_graph cuda_graph_scope cuda_graph_impl use_cuda_graph
        cuda_graphs""",
    "train.max_skipped_steps": """
        check_for_nan_in_loss_and_grad no_check_for_nan_in_loss_and_grad skip_nan logging_nan_inf_filter""",
    "train.sample_prompts": "eval_prompts generate_prompts sample_prompt",
    # Options.
    "--config": "conf cfg config_file config_path job.config_file",
    "--evaluate-only": "eval_only do_predict skip_train",
    "--dry-run": "dryrun estimate_memory",
    "--world": "world_size",
    "--help": "h",
}  # fmt: skip

_LEAVE_OUT = "leave it out"
_NO_PIPELINE = "there is no pipeline parallelism; raise mesh.ep, mesh.tp or mesh.cp instead"
_BY_TRAINER = "train.py has no such thing; keep your trainer and wrap its model (docs/trainers.md)"
_NOT_HERE = {
    _NO_PIPELINE: """
        pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree
        pp_size num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size
        pipeline_parallel_schedule pipeline_parallel_microbatch_size pipeline_parallel_split_points
        num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers
        pipeline_model_parallel_layout decoder_last_pipeline_num_layers pp_degree pp_schedule""",
    "no file of DeepSpeed is read; set fsdp.shard (ZeRO 1 to 3), and drop it": """
        deepspeed deepspeed_config ds_config""",
    f"with mesh.tp, activations are split along the sequence in any case; {_LEAVE_OUT} (to split long rows, "
    "set mesh.cp)": "sequence_parallel enable_sequence_parallel disable_sequence_parallel",
    f"gathers and reductions run while layers compute in any case; {_LEAVE_OUT}": """
        overlap_grad_reduce overlap_comm reduce_bucket_size allgather_bucket_size contiguous_gradients
        ddp_bucket_size ddp_num_buckets ddp_bucket_cap_mb reduce_scatter allgather_partitions
        sub_group_size stage3_max_live_parameters stage3_max_reuse_distance
        stage3_param_persistence_threshold overlap_param_gather_with_optimizer_step
        ddp_average_in_collective align_param_gather round_robin_gradients ddp_find_unused_parameters
        ddp_broadcast_buffers fsdp_use_orig_params fsdp_sync_module_states
        stage3_gather_16bit_weights_on_model_save fsdp_state_dict_type""",
    f"collectives of tensor parallelism are single ones, which is faster here; {_LEAVE_OUT}": """
        tp_comm_overlap enable_async_tensor_parallel async_tensor_model_parallel_allreduce
        disable_tp_comm_overlap_ag enable_async_tp""",
    f"attention is a fused kernel that keeps packed documents apart, in any case; {_LEAVE_OUT}": """
        flash_attention flash_attn use_flash_attn attn_implementation attention_backend
        use_flash_attention use_flash_attention_2 sdp_attention xformers_attention flex_attention
        use_flex_attn attn_type attn_mask_type reset_position_ids reset_attention_mask eod_mask_loss
        no_create_attention_mask_in_dataloader s2_attention shift_attn flash_attn_cross_entropy
        attn_backend sdpa use_flash_attn_2""",
    f"model.architecture decides it; {_LEAVE_OUT}": """
        swiglu normalization activation_func squared_relu group_query_attention multi_latent_attention
        moe_router_score_function score_func hidden_act apply_layernorm_1p use_rotary_position_embeddings
        no_position_embedding score_before_experts moe_router_dtype use_mcore_models rotary_interleaved
        moe_apply_probs_on_input gated_linear_unit""",
    f"scales follow from the values of each step, without a history; {_LEAVE_OUT}": """
        fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_interval fp8_wgrad
        precompute_float8_dynamic_scale_for_fsdp moe_router_padding_for_fp8
        force_recompute_fp8_weight_in_bwd moe_router_padding_for_quantization""",
    f"dropout is that of the config.json of model.hf, or of adapters (adapter.dropout); {_LEAVE_OUT}": """
        hidden_dropout attention_dropout attn_dropout resid_dropout embd_pdrop neftune_noise_alpha
        hidden_dropout_prob attn_pdrop""",
    f"the schedule spans train.steps; {_LEAVE_OUT}": """
        lr_decay_iters lr_decay_steps lr_decay_samples total_num_steps lr_decay_ratio lr_scheduler.steps
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler""",
    "batches have one size for a whole run; set train.global_batch_size": """
        rampup_batch_size batch_size_rampup batch_size_warmup""",
    'no size is tried out; --dry-run plans the memory of one, and memory.recompute = ["auto"] fills it': """
        auto_find_batch_size auto_batch_size autotuning""",
    f"checkpoints have one format, of safetensors; {_LEAVE_OUT} (python -m fsdmoe.checkpoint to-hf writes a "
    "folder for transformers)": """
        ckpt_format dist_ckpt_format save_safetensors last_save_in_hf save_only_model last_save_model_only
        no_save_optim no_save_rng model_save_format save_consolidated use_dist_ckpt export_dtype
        save_hf_weights hf_save merge_lora save_merged consolidate_checkpoint auto_detect_ckpt_format
        dist_ckpt_strictness""",
    f"nothing is uploaded; {_LEAVE_OUT} (python -m fsdmoe.checkpoint to-hf writes a folder)": """
        push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hf_upload""",
    "no checkpoint is chosen by its loss; look at metrics.jsonl, and keep more (checkpoint.keep_every)": """
        load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience
        early_stopping_threshold early_stop early_stopping""",
    f"there is nothing to set for it here; {_LEAVE_OUT}": """
        weight_decay_incr_style decrease_batch_size_if_needed distribute_saved_activations plugins booster
        data_parallel_random_init lr_warmup_init use_checkpoint_args hysteresis fp32_residual_connection
        apply_query_key_layer_scaling attention_softmax_in_fp32 delay_grad_reduce use_tp_pp_dp_mapping
        hierarchical_context_parallel_sizes nccl_communicator_config_path retriever_seq_length
        te_rng_tracker moe_input_jitter_eps moe_extended_tp init_model_with_meta_device
        calculate_per_token_loss config_logger_dir empty_unused_memory_level high_priority_stream_groups
        disable_loss_parallel print_after_conversion job.description prediction_loss_only log_level
        save_on_each_node strict restore_callback_states_from_checkpoint fp16_opt_level disable_tqdm
        accelerator_config ray_scope dataloader_persistent_workers average_tokens_across_devices
        precompute_ref_log_probs lora_task_type is_mistral_derived_model multipack_real_batches
        eval_table_size prescale_gradients infer_backend gradient_predivide_factor
        zero_allow_untested_optimizer sparse_gradients use_unsloth_gc aio aio.block_size csv_monitor
        comms_logger data_efficiency fast_inference gpu_memory_utilization rng.ranked dist_env.backend
        dataloader.collate_fn collate_fn visual_inputs plot_loss model_revision bias peft.use_triton
        torch_empty_cache padding_free optimizer.implementation""",
    "no dense model is made into one of experts; convert its weights first, and name them in model.hf": """
        moe_use_upcycling moe_upcycling_granularity upcycling sparse_upcycling""",
    _BY_TRAINER: """
        label_smoothing_factor label_smoothing reward_model reward_funcs num_generations grpo ppo kto orpo
        reward_model_path ref_model loss_fn custom_loss kl_coef rollout distillation teacher_model
        ref_load kd_teacher_load num_rollout class_weights""",
    f"code of a model's folder is never run; {_LEAVE_OUT} (wrap such a model with fsdmoe.parallelize, "
    "docs/huggingface.md)": "trust_remote_code custom_import remote_code",
    f"rows are packed (data.pack), so there is nothing to group; {_LEAVE_OUT}": """
        group_by_length length_column_name curriculum_sampling train_sampling_strategy""",
    f"data is tokenised once, into data.cache_dir, and read from there; {_LEAVE_OUT}": """
        streaming overwrite_cache num_dataset_builder_threads buffer_size skip_prepare_dataset mmap
        no_mmap_bin_files preprocess_iterable stream dataset_kwargs""",
    "a signal (SIGTERM) makes a run save and end; leave it out, or set train.steps": """
        exit_duration_in_mins exit_signal_handler exit_on_signal max_time""",
    f"metrics.jsonl has all that is measured; {_LEAVE_OUT}": """
        log_throughput log_timers_to_tensorboard log_memory_to_tensorboard log_params_norm
        log_num_zeros_in_grad include_tokens_per_second include_num_input_tokens_seen timing_log_level
        log_world_size_to_tensorboard log_validation_ppl_to_tensorboard wall_clock_breakdown
        log_learning_rate_to_tensorboard moe_per_layer_logging log_loss_scale_to_tensorboard
        log_global_rank log_grad_norm""",
    "it is set by the environment: WANDB_ENTITY, WANDB_TAGS, WANDB_NOTES": """
        wandb_entity wandb_team wandb_tags wandb_watch wandb_log_model entity""",
    f"the launcher gives every rank its GPU; {_LEAVE_OUT}": """
        local_rank no_cuda use_cpu device_map cuda_device accelerator ddp_backend distributed_backend
        use_mps_device strategy""",
    "write --nproc-per-node N (before train.py under torchrun; fsdmoe train takes it anywhere)": """
        n np nproc nprocs nproc_per_host num_ranks ranks""",
    "the launcher starts a rank for each GPU: torchrun --nproc-per-node N train.py, or fsdmoe train": """
        num_gpus n_gpu n_gpus ngpus num_processes num_devices gpus devices num_nodes gpus_per_node
        num_machines gpu_ids n_gpus_per_node""",
    f"a run always trains, and goes on where its folder stopped; {_LEAVE_OUT} (a new run: another "
    "train.output_dir)": "do_train overwrite_output_dir exit_on_missing_checkpoint",
    f"no columns are removed and none but data.field are read; {_LEAVE_OUT}": """
        remove_unused_columns label_names dataset_fields""",
    f"drawn as peft does by default; {_LEAVE_OUT}": """
        init_lora_weights lora_init lora_a_init peft_init_lora_weights lora_weight_init""",
    "an update counts alpha / rank; for rank-stabilised LoRA set adapter.alpha = ALPHA x sqrt(rank)": """
        use_rslora peft_use_rslora rslora""",
    "adapters are trained alone; list projections in adapter.target_modules, or set "
    "adapter.freeze_base = false": """
        modules_to_save lora_modules_to_save additional_target unfrozen_parameters lora_bias
        trainable_token_indices lora_fan_in_fan_out layers_to_transform freeze_trainable_layers""",
    f"gradients are stepped once all are reduced; {_LEAVE_OUT}": """
        early_step_in_backward optimizer_in_backward galore use_galore""",
    f"the tokenizer's own tokens are used (data.eos_token and data.bos_token name others); {_LEAVE_OUT}": """
        special_tokens pad_token padding_side use_fast_tokenizer tokenizer_use_fast add_special_tokens
        pad_token_id padding""",
    f"every row is full, so there is no last batch to drop; {_LEAVE_OUT}": "dataloader_drop_last drop_last",
    "no snapshot of memory is written; --dry-run plans it, and observe.profile writes a trace": """
        enable_memory_snapshot record_memory_history memory_snapshot_path save_memory_snapshot_folder""",
}  # fmt: skip


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name.lower(): answer for answer, names in table.items() for name in names.split()}


ALIASES = _by_name(_MEANT)
"""By a name of another tool: what to write, which begins with a key or an option."""
NOT_HERE = _by_name(_NOT_HERE)
"""By a name of another tool: one sentence on why there is no such key."""
SECTIONS_ELSEWHERE = {
    "training": "train", "trainer": "train", "job": "train", "run": "train", "step_scheduler": "train",
    "training_args": "train", "trainingarguments": "train", "validation": "train", "debug": "train",
    "optimizer": "optim", "lr_scheduler": "optim", "scheduler": "optim", "optimization": "optim",
    "parallel": "mesh", "parallelism": "mesh", "distributed": "mesh", "device_mesh": "mesh",
    "lora": "adapter", "peft": "adapter", "peft_config": "adapter", "lora_config": "adapter",
    "dataset": "data", "dataloader": "data", "data_args": "data", "packed_sequence": "data",
    "model_args": "model", "moe": "experts", "router": "experts",
    "metrics": "observe", "logging": "observe", "profiling": "observe", "wandb": "observe",
    "tensorboard": "observe", "logger": "observe", "mlflow": "observe",
    "activation_checkpoint": "memory", "activation_checkpointing": "memory", "float8": "precision",
    "mx": "precision", "quantization": "precision", "quantize": "precision", "amp": "precision",
    "fp8": "precision", "bf16": "precision", "fp16": "precision",
    "comm": "health",
    "zero_optimization": "fsdp", "fsdp_config": "fsdp", "checkpointing": "checkpoint", "dpo": "preference",
}  # fmt: skip
"""Tables of other tools, and the section that most of their keys are in here."""
