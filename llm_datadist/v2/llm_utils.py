"""Two helpers that programs borrow."""

from __future__ import annotations

from llm_datadist._addresses import split_address
from llm_datadist._checks import check_isinstance, typed

__all__ = ["layer_range_to_tensor_indices", "parse_listen_ip_info"]


def layer_range_to_tensor_indices(
    src_layer_range: range | None, dst_layer_range: range | None, tensor_num_per_layer: int = 2
) -> tuple[list[int], list[int]]:
    """Give the tensors that two ranges of layers select.

    Parameters
    ----------
    src_layer_range, dst_layer_range : range or None
        Layers of source and destination; None selects nothing.
    tensor_num_per_layer : int, default 2
        Consecutive tensors that make a layer.

    Returns
    -------
    tuple of two lists of int
        Tensor indices of source and destination, in order: ``range(1, 2)`` selects 2 and 3.

    Raises
    ------
    TypeError
        When a range is something else.
    """
    source, destination = (
        [
            layer * tensor_num_per_layer + tensor
            for layer in check_isinstance(name, layers, range) or ()
            for tensor in range(tensor_num_per_layer)
        ]
        for name, layers in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range))
    )
    return source, destination


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """Take apart ``ip:port`` or ``[ipv6]:port``.

    Parameters
    ----------
    listen_ip_info : str
        As in `LLMConfig.listen_ip_info`, for one device. The ip is not looked at; the port is in [1, 65535].

    Returns
    -------
    tuple of str and int
        The ip, without brackets, and the port.

    Raises
    ------
    TypeError
        When `listen_ip_info` is no text.
    LLMException
        LLM_PARAM_INVALID (also a ValueError) when the text has another form.
    """
    return split_address("listen_ip_info", typed("listen_ip_info", listen_ip_info, str))
