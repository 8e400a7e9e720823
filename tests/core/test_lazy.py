"""Packages import what they offer when it is asked for."""

import importlib
import pkgutil

import pytest

import fsdmoe

PACKAGES = ("checkpoint", "config", "data", "fsdp", "models", "observe", "optim", "precision")


@pytest.mark.parametrize("name", ["", *(f".{package}" for package in PACKAGES)])
def test_every_name_of_a_package_is_there_and_no_module_has_it_too(name: str) -> None:
    package = importlib.import_module(f"fsdmoe{name}")
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)} - {"checkpoint"}
    assert not modules & set(package.__all__), "importing the module would hide the name"
    assert all(getattr(package, each) is not None for each in package.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fsdmoe' has no attribute 'nothing'"):
        _ = fsdmoe.nothing
