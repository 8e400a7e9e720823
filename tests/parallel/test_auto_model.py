"""The front door: which kind a model is of, and that both kinds are called alike."""

from __future__ import annotations

import inspect

import torch
from torch import nn

import fsdmoe
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.kind import WrappedKind
from fsdmoe.models import CausalLM, Decoder, ModelConfig, build_model
from fsdmoe.parallel.auto_model import NativeKind, build_any_model, kind_of


def test_a_decoder_is_native_and_anything_else_is_wrapped() -> None:
    assert isinstance(kind_of(build_model(ModelConfig())), NativeKind)
    assert isinstance(kind_of(nn.Linear(2, 2)), WrappedKind)


def test_a_run_without_a_folder_builds_a_decoder_that_is_called_as_it_is() -> None:
    model, kind = build_any_model(ModelConfig(), ExpertsConfig())
    assert isinstance(model, Decoder)
    assert next(model.parameters()).is_meta
    assert not kind.own_attention
    assert kind.causal_lm() is model
    assert fsdmoe.as_causal_lm(model) is model


def test_both_kinds_take_the_arguments_of_a_causal_lm_by_their_names() -> None:
    wanted = set(inspect.signature(CausalLM.__call__).parameters)
    assert set(inspect.signature(Decoder.forward).parameters) == wanted
    assert set(inspect.signature(WrappedCausalLM.__call__).parameters) == wanted
    methods = {name for name in vars(CausalLM) if not name.startswith("_")}
    assert all(hasattr(kind, name) for kind in (Decoder, WrappedCausalLM) for name in methods)


def test_without_a_policy_a_wrapped_model_computes_in_its_own_dtypes() -> None:
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    dtype_of = kind_of(nn.Linear(2, 2)).dtype_of(None)
    assert dtype_of is not None
    assert dtype_of("weight", half) == torch.bfloat16
    assert kind_of(nn.Linear(2, 2)).dtype_of(torch.bfloat16) is None
    assert kind_of(build_model(ModelConfig())).dtype_of(None) is None
