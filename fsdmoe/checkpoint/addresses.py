"""Addresses of object stores, which fsspec opens. This file alone imports it."""

from __future__ import annotations

from typing import Any

from fsdmoe.checkpoint.errors import CheckpointError

_NEEDS_FSSPEC = "object stores need fsspec; pip install fsspec"


def open_address(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{address}: {_NEEDS_FSSPEC}") from error
    try:
        file_system, root = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{address}: fsspec cannot open it: {error}") from error
    return file_system, root


def why_not_opened(address: str) -> str:
    """What is missing for an address of this kind to be opened here; empty: nothing. Nothing is connected."""
    try:
        from fsspec import get_filesystem_class
    except ImportError:
        return _NEEDS_FSSPEC
    for link in address.split("::"):  # simplecache::s3://bucket
        try:
            get_filesystem_class(link.partition("://")[0])
        except (ImportError, ValueError) as error:  # which says what to install
            return str(error)
    return ""
