"""Quantised rows for dispatch: one byte per number, and scales that travel with their row. Built in: notebook 07.

`formats` has the arithmetic, `exponents` the packed power-of-two scales, `wire` the byte row, `policy` says which
backend quantises before the rows travel, `precision` what it costs, `blocks` the scales of a quantised checkpoint.

Source: vLLM `fp8_utils.py : per_token_group_quant_fp8` and `FM/utils.py : moe_kernel_quantize_input`.
"""

from moe_course.quant.exponents import pack_exponents, unpack_exponents
from moe_course.quant.formats import FORMATS, Format, dequantize, format_named, quantize, scales_per_row
from moe_course.quant.policy import WHEN, when
from moe_course.quant.precision import QuantError, error, error_bound
from moe_course.quant.wire import pack, row_bytes, unpack

__all__ = [
    "FORMATS",
    "WHEN",
    "Format",
    "QuantError",
    "dequantize",
    "error",
    "error_bound",
    "format_named",
    "pack",
    "pack_exponents",
    "quantize",
    "row_bytes",
    "scales_per_row",
    "unpack",
    "unpack_exponents",
    "when",
]
