"""Whether addresses of object stores can be opened here, without a connection to one."""

from __future__ import annotations


def why_not_opened(protocol: str) -> str:
    """What is missing for addresses of this protocol, and what to install; empty: nothing."""
    try:
        from fsspec import available_protocols, get_filesystem_class
    except ImportError:
        return "object stores need fsspec; pip install fsspec"
    if protocol not in available_protocols():
        return f"fsspec knows no {protocol}://; take s3://, gs:// or another of its protocols"
    try:
        get_filesystem_class(protocol)
    except ImportError as error:  # fsspec says which package to install
        return str(error)
    return ""
