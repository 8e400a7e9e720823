"""Everything about wrapped Hugging Face models; nothing here is needed to train a native decoder.

=====================  =======================================================================================
``kind``               what ``parallelize`` does for a wrapped model, in its order: start reading here
``adapters``           which modules are experts, recognised by structure; ``register_moe_adapter``
``wrapped_experts``    their parameters split over ``ep``, their forward through our dispatcher and kernels
``tensor_plan``        which projections ``tp`` splits
``attention``          attention that follows a plan, across ranks under ``cp``
``loss``, ``balance``  the loss without logits; the auxiliary loss over several ranks' tokens
``init``               values of parameters on the meta device, by the model's own rules
``causal_lm``          a wrapped model as ``train.py`` calls it
``folder``, ``limits`` a folder's ``config.json``: sizes, and what rows that are split cannot have
``refit``              weights for an inference engine, in Hugging Face names
``no_rows``            calls with a batch of no rows
``vision``             towers that some ranks have no image for
``trainer``            transformers' and TRL's trainers around a sharded model
``accelerator``        Accelerate's loop around one
``transformers_api``   the only file that imports transformers
=====================  =======================================================================================

Folders of safetensors are read and written by :mod:`fsdmoe.checkpoint`, tokenizers by :mod:`fsdmoe.data`.
"""
