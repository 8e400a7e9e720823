"""Everything about wrapped Hugging Face models; nothing here is needed to train a native decoder.

=====================  =======================================================================================
``kind``               what ``parallelize`` does for a wrapped model, in its order: start reading here
``adapters``           which modules are experts, recognised by structure; ``register_moe_adapter``
``wrapped_experts``    their parameters split over ``ep``, their forward through our dispatcher and kernels
``fused_layers``       norms, projections and the like that our kernels compute; what is left, and why
``attention_forward``  the same for attention; ``rotary_forms``: its positions, ``router_forms``: routers
``tensor_plan``        which projections ``tp`` splits
``attention``          attention that follows a plan, across ranks under ``cp``
``loss``, ``balance``  the loss without logits; the auxiliary loss over several ranks' tokens
``init``               values of parameters on the meta device, by the model's own rules
``causal_lm``          a wrapped model as ``train.py`` calls it; ``preference``: the same with a loss of pairs
``folder``, ``limits`` a folder's ``config.json``: sizes, and what rows that are split cannot have
``replay``             routing recorded, or followed, by routers that are the model's own
``generation``         ``generate()`` on ranks that share weights, experts or heads
``lora``               adapters by peft around attention and experts: how they are split, what they compute
``lora_life``          the same saved, loaded, merged; ``lora_init``: values, ``lora_config``: their section
``refit``              weights for an inference engine, in Hugging Face names
``refit_link``         the same to another process
``no_rows``            calls with a batch of no rows
``vision``             towers that some ranks have no image for
``trainer``            transformers' and TRL's trainers around a sharded model; ``reference``: of pairs
``accelerator``        Accelerate's loop around one
``transformers_api``   the only file that imports transformers; ``peft_api`` the only one that imports peft
=====================  =======================================================================================

Folders of safetensors are read and written by :mod:`fsdmoe.checkpoint`, tokenizers by :mod:`fsdmoe.data`.
"""
