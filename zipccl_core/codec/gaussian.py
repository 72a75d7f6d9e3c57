"""The theory behind the window: what the exponents of normally distributed values look like, in closed form.

Pure functions of sigma, without torch, numpy or random numbers. Throughout, `X ~ N(0, sigma^2)` is rounded to nearest
into a floating-point format; `e` is the *exponent field* as it is stored (biased, so 127 stands for 2^0 in bfloat16);
`erf` and `erfc` are the error functions; `sigma` has the unit of the values; entropies and sizes are in bits a value.
The derivations in full, with the measured counterparts, stand in `docs/theory.md`.
"""

import math
from functools import cache
from itertools import pairwise
from typing import NamedTuple

_SQRT2 = math.sqrt(2.0)
_LN2 = math.log(2.0)
_EULER_GAMMA = 0.57721566490153286
_MOST_CELLS = 1 << 12
"""Up to this many mantissas an exponent, the entropy of a word is an exact sum; beyond, an integral."""

MEAN_LOG2_OFFSET = (_EULER_GAMMA + _LN2) / (2.0 * _LN2)
"""`log2(sigma) - E[log2|X|]`: (gamma + ln 2) / (2 ln 2) = 0.9164 octaves."""

WIRE_OVERHEAD_BITS = 6 * 8 / 1024
"""What the wire format adds to a value: 4 bytes of offset and 2 of meta for a block of 1024."""


class FloatFormat(NamedTuple):
    """A binary floating-point format: a sign bit, `exponent_bits`, `mantissa_bits`.

    Field 0 holds zeros and subnormals. The top field holds infinities and NaNs where `has_infinity`; otherwise (e4m3fn)
    it holds finite values like any other field, except for its last mantissa, which is NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool = True

    @property
    def bits(self) -> int:
        """Bits of a whole word."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def n_exponents(self) -> int:
        """How many values the exponent field has."""
        return 1 << self.exponent_bits

    @property
    def rounding_factor(self) -> float:
        """Where a normal exponent begins, as a multiple of its power of two: `1 - 2^-(mantissa_bits + 2)`.

        Below 2^k values lie `2^(k-1-m)` apart, so that all within half of that under 2^k are rounded up to 2^k:
        from `2^k - 2^(k-2-m)` on.
        """
        return 1.0 - math.ldexp(1.0, -(self.mantissa_bits + 2))

    def max_window_start(self, size: int = 7) -> int:
        """The last start of a window of `size` fields that leaves the infinities out: 248 for bfloat16 and seven."""
        return self.n_exponents - size - (1 if self.has_infinity else 0)


BF16 = FloatFormat("bfloat16", exponent_bits=8, mantissa_bits=7, bias=127)
FP16 = FloatFormat("float16", exponent_bits=5, mantissa_bits=10, bias=15)
FP32 = FloatFormat("float32", exponent_bits=8, mantissa_bits=23, bias=127)
E4M3 = FloatFormat("float8_e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, has_infinity=False)
E5M2 = FloatFormat("float8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15)

FORMATS = {fmt.name: fmt for fmt in (BF16, FP16, FP32, E4M3, E5M2)}
"""The formats by the name that torch gives the dtype."""


class WindowRule(NamedTuple):
    """Where the best window begins: `bias + shift + floor(log2(sigma) + offset)`, with `0 <= offset < 1`."""

    shift: int
    offset: float


def exponent_probability(e: int, sigma: float, fmt: FloatFormat = BF16) -> float:
    """P(the exponent field is `e`) for X ~ N(0, sigma^2), rounded to nearest into `fmt`.

    With `b(e)` the smallest magnitude that is rounded to a value of field e,

        P(e) = erf(b(e+1) / (sigma sqrt 2)) - erf(b(e) / (sigma sqrt 2)),
        b(e) = 2^(e - bias) (1 - 2^-(m+2))   for e > 1,

    because `P(|X| < b) = erf(b / (sigma sqrt 2))`. With `u = b(e) / sigma` that is
    `erf(2u / sqrt 2) - erf(u / sqrt 2)`, so `P(e; 2 sigma) = P(e - 1; sigma)`. The ends differ: `b(0) = 0` (zeros and
    subnormals); `b(1) = 2^(1-bias) (1 - 2^-(m+1))`, as the subnormals below it lie twice as far apart; the top field
    reaches to infinity. In an IEEE format that is overflow to infinity; in e4m3fn the field also holds finite values,
    and what lies beyond the largest stays in the field whether a conversion saturates, as torch's does, or gives NaN.

    `sigma` has the unit of the values. Raises ValueError where `sigma` is not positive and finite, or `e` is no
    exponent of `fmt`. Source: docs/theory.md, section 1.
    """
    _check_sigma(sigma)
    if not 0 <= e < fmt.n_exponents:
        raise ValueError(f"exponent {e!r} is not a field of {fmt.name}; allowed: 0..{fmt.n_exponents - 1}")
    return _mass(_lower_bound(e, fmt) / sigma, _lower_bound(e + 1, fmt) / sigma)


def exponent_distribution(sigma: float, fmt: FloatFormat = BF16) -> tuple[float, ...]:
    """P(e) for all exponent fields `e` of `fmt`, in order; they sum to 1.

    The sum telescopes: erf(infinity) - erf(0). See `exponent_probability` for the closed form and what it assumes.

    `sigma` has the unit of the values. Raises ValueError where `sigma` is not positive and finite. Source:
    docs/theory.md, section 1.
    """
    _check_sigma(sigma)
    bounds = [_lower_bound(e, fmt) / sigma for e in range(fmt.n_exponents + 1)]
    return tuple(_mass(a, b) for a, b in pairwise(bounds))


def best_window(sigma: float, fmt: FloatFormat = BF16, size: int = 7) -> int:
    """The start of the `size` consecutive exponents that hold the most probability, found by trying every start.

    Starts run from 0 to `fmt.max_window_start(size)`: no window takes in the infinities. Ties go to the lower start.
    Clear of field 0 no other set of `size` holds more, because P is unimodal (docs/theory.md, section 2).

    `sigma` has the unit of the values. Raises ValueError where `sigma` is not positive and finite, or no window of
    `size` fits.
    """
    _check_size(size, fmt)
    probabilities = exponent_distribution(sigma, fmt)
    return max(range(fmt.max_window_start(size) + 1), key=lambda start: math.fsum(probabilities[start : start + size]))


@cache
def window_rule(size: int = 7, mantissa_bits: int | None = None) -> WindowRule:
    """The constants of the best start, `bias + shift + floor(log2(sigma) + offset)`: -5 and 0.2832 in bfloat16.

    Derivation: moving the window from `s` to `s + 1` trades P(s) for P(s + size). Let
    `g(u) = erf(2u / sqrt 2) - erf(u / sqrt 2)`; the trade is even at the one `u*` where `g(u) = g(2^size u)` (g rises
    up to 0.680 and falls beyond, so there is one). The best `s` is the first whose lower end is at or above `u* sigma`:
    `s = bias + 1 + floor(log2(sigma) + log2(u*))`. For seven `u* = 0.01898`, which gives 0.2804 for values before
    rounding (`mantissa_bits=None`). Rounding to `m` bits moves all lower ends by `1 - 2^-(m+2)`, so its log2 is
    subtracted: 0.0028 for bfloat16. `u*` is found by bisection, once for each `size`.

    `offset` is in octaves. Raises ValueError where `size` is below 1. Source: docs/theory.md, section 2.
    """
    if size < 1:
        raise ValueError(f"window size {size!r} is below 1")
    high = math.log2(_peak())  # here P(s) is the largest of all, so larger than P(s + size)
    low = high - size  # and here P(s + size) is
    for _ in range(64):
        middle = (low + high) / 2.0
        u = 2.0**middle
        if _mass(u, 2.0 * u) < _mass(2.0**size * u, 2.0 ** (size + 1) * u):
            low = middle
        else:
            high = middle
    constant = 1.0 + high
    if mantissa_bits is not None:
        constant -= math.log2(1.0 - math.ldexp(1.0, -(mantissa_bits + 2)))
    shift = math.floor(constant)
    return WindowRule(shift, constant - shift)


def window_start(sigma: float, fmt: FloatFormat = BF16, size: int = 7) -> int:
    """The start of the best window in closed form: for seven of bfloat16 `122 + floor(log2(sigma) + 0.2832)`, clamped.

    This is the wire format's rule for the option `sigma`; its constant is that of `window_rule` to four decimals, so
    that whoever computes it anew has the same byte. Over all sigma it is `best_window`, but for the 4e-5 of an octave
    that the rounded decimals leave, from a start of 3 on (below, the subnormals, all in field 0, count). The clamp is
    `0..fmt.max_window_start(size)`, 0..248 for seven of bfloat16: a window never takes in the infinities.

    `sigma` has the unit of the values. Raises ValueError where `sigma` is not positive and finite, or no window of
    `size` fits. Source: docs/theory.md, section 2; docs/wire-format.md, "Choosing base and mode".
    """
    _check_sigma(sigma)
    _check_size(size, fmt)
    rule = window_rule(size, fmt.mantissa_bits)
    start = fmt.bias + rule.shift + math.floor(math.log2(sigma) + round(rule.offset, 4))
    return min(max(start, 0), fmt.max_window_start(size))


def coverage(sigma: float, fmt: FloatFormat = BF16, size: int = 7, *, start: int | None = None) -> float:
    """P(the exponent lies in the window of `size` fields from `start` on); without `start`, in the best window.

    The sum of P(e) telescopes: `erf(b(start + size) / (sigma sqrt 2)) - erf(b(start) / (sigma sqrt 2))`, `b` as in
    `exponent_probability`. For bfloat16 and seven it goes from 0.970 to 0.979 over the fractional part of log2(sigma).

    `sigma` has the unit of the values; the result is a fraction. Raises ValueError where `sigma` is not positive and
    finite, or the window is not one of `fmt`. Source: docs/theory.md, section 3.
    """
    _check_sigma(sigma)
    _check_size(size, fmt)
    if start is None:
        start = best_window(sigma, fmt, size)
    elif not 0 <= start <= fmt.n_exponents - size:
        raise ValueError(f"window start {start!r} is not in 0..{fmt.n_exponents - size}, for {size} of {fmt.name}")
    return _mass(_lower_bound(start, fmt) / sigma, _lower_bound(start + size, fmt) / sigma)


def expected_bits(
    sigma: float,
    fmt: FloatFormat = BF16,
    size: int = 7,
    *,
    escape_bits: float | None = None,
    overhead_bits: float = 0.0,
    zeros: float = 0.0,
    zero_code: bool = False,
) -> float:
    """Bits a value of the window code: sign and mantissa, a code of fixed length, escapes for what the window misses.

        1 + mantissa_bits + ceil(log2(codes)) + escape_bits * P(escape) + overhead_bits

    There are `size` codes, one for the escape, and one more for exponent 0 where `zero_code` (the wire format's mode 1
    is `size=6, zero_code=True`). A fraction `zeros` of the values is exactly zero, the others are normally distributed:
    the escapes are `(1 - zeros) (1 - coverage)`, and the zeros too where they have no code and the window does not
    begin at 0.

    `escape_bits` is what an escape adds, the raw exponent by default (8 in bfloat16).
    `overhead_bits=WIRE_OVERHEAD_BITS` adds what the wire format spends on a block; its header of 128 bytes a frame is
    not counted.

    `sigma` has the unit of the values that are not zero. Raises ValueError where `sigma` is not positive and finite,
    `zeros` is not in 0..1, or no window of `size` fits. Source: docs/theory.md, sections 3 and 6.
    """
    if not 0.0 <= zeros <= 1.0:
        raise ValueError(f"zeros {zeros!r} is not a fraction in 0..1")
    start = best_window(sigma, fmt, size)
    escapes = (1.0 - zeros) * (1.0 - coverage(sigma, fmt, size, start=start))
    if not zero_code and start > 0:
        escapes += zeros
    elif zero_code and start > 0:
        escapes -= (1.0 - zeros) * exponent_probability(0, sigma, fmt)
    code_bits = (size + (1 if zero_code else 0)).bit_length()
    raw_exponent_bits = fmt.exponent_bits if escape_bits is None else escape_bits
    return 1 + fmt.mantissa_bits + code_bits + raw_exponent_bits * escapes + overhead_bits


def expected_ratio(
    sigma: float,
    fmt: FloatFormat = BF16,
    size: int = 7,
    *,
    escape_bits: float | None = None,
    overhead_bits: float = 0.0,
    zeros: float = 0.0,
    zero_code: bool = False,
) -> float:
    """Raw bits over `expected_bits` (the same arguments): above 1 where the code pays.

    For bfloat16 and seven: 1.423 to 1.432 over the fractional part of log2(sigma).

    Raises what `expected_bits` raises. Source: docs/theory.md, section 3.
    """
    bits = expected_bits(
        sigma, fmt, size, escape_bits=escape_bits, overhead_bits=overhead_bits, zeros=zeros, zero_code=zero_code
    )
    return fmt.bits / bits


def exponent_entropy(sigma: float, fmt: FloatFormat = BF16) -> float:
    """The entropy of the exponent field, `-sum P(e) log2 P(e)`, in bits a value: 2.54 for bfloat16, whatever the sigma.

    No lossless code of the exponents alone takes fewer bits on the average (Shannon). Doubling sigma shifts P by one
    field, so that only the fractional part of log2(sigma) matters away from the ends of the format.

    `sigma` has the unit of the values. Raises ValueError where `sigma` is not positive and finite. Source:
    docs/theory.md, section 4.
    """
    return -math.fsum(p * math.log2(p) for p in exponent_distribution(sigma, fmt) if p > 0.0)


def entropy_floor(sigma: float, fmt: FloatFormat = BF16) -> float:
    """The entropy of the whole word, in bits a value: what no lossless code can go below on independent normal values.

    The exponent's entropy, the mantissa's given the exponent, and one bit for the sign (X is symmetric, and zeros have
    signs). It is a sum of `-p log2 p` over the format's words, each with the probability of what is rounded to it. Up
    to 2^12 mantissas the sum is exact. Beyond (float32) the cells of one exponent, all of width d, are summed by the
    integral of the folded density `f = 2 phi`:

        -int f log2(f d) = -P log2(2 d / (sigma sqrt(2 pi))) + (P - 2 (b phi(b) - a phi(a))) / (2 ln 2),

    with a and b the ends of the exponent over sigma, and its first cell, which is narrower, corrected; the error is of
    the order of 4^-m. Over all exponents, and but for terms of the order of 2^-m, the integrals add up to
    `m + log2(sigma sqrt(2 pi e)) - E[floor(log2|X|)] = m + 3.4635`.

    In e4m3fn what lies beyond the largest value is taken to saturate.

    `sigma` has the unit of the values. Raises ValueError where `sigma` is not positive and finite. Source:
    docs/theory.md, section 4.
    """
    _check_sigma(sigma)
    return 1.0 + math.fsum(_magnitude_entropy(e, sigma, fmt) for e in range(fmt.n_exponents))


def log_moment(sigma: float, fmt: FloatFormat = BF16) -> float:
    """E[floor(log2|X|)] of X ~ N(0, sigma^2) rounded to `fmt`'s mantissa: the mean exponent field less the bias.

    Computed as the sum of `k P(k)` over all powers of two, as though the format's exponents had no ends. In closed form
    it is

        log2(sigma) - (gamma + ln 2) / (2 ln 2) - 1/2 - log2(1 - 2^-(m+2)) + w(log2 sigma) = log2(sigma) - 1.4164 + ...

    Derivation: `E|Z|^s = 2^(s/2) Gamma((1+s)/2) / sqrt(pi)`, so its derivative at s = 0 gives
    `E ln|Z| = (ln 2 + psi(1/2)) / 2 = -(gamma + ln 2) / 2`; `floor(y) = y - 1/2 + sum_k sin(2 pi k y) / (pi k)`; and
    rounding is a change of sigma, by its factor. `w` has period 1 and is small, as
    `|Gamma(1/2 + iy)|^2 = pi / cosh(pi y)`: its harmonic k has the amplitude `1 / (pi k sqrt(cosh(pi^2 k / ln 2)))`,
    3.6e-4 for k = 1 and 1.5e-7 for k = 2.

    `sigma` has the unit of the values; the result is in octaves. Raises ValueError where `sigma` is not positive and
    finite. Source: docs/theory.md, section 5.
    """
    _check_sigma(sigma)
    mantissa, centre = math.frexp(sigma)  # taken apart, so that no power of two below overflows
    mantissa /= fmt.rounding_factor
    # Beyond 2^5 sigma nothing is left of P; below 2^-64 sigma it falls by halves, far under one part in 10^16.
    terms = (k * _mass(math.ldexp(1.0, k) / mantissa, math.ldexp(1.0, k + 1) / mantissa) for k in range(-64, 6))
    return centre + math.fsum(terms)


def sigma_from_log_moment(mean_exponent: float, fmt: FloatFormat = BF16) -> float:
    """The sigma whose values have this mean exponent; the inverse of `log_moment`.

    `mean_exponent` is the mean of `floor(log2|x|)`, in octaves: of the exponent fields of all values but zeros, less
    `fmt.bias`. The closed form without the periodic term, `2^(mean_exponent + 1.4164 + log2(1 - 2^-(m+2)))`, is within
    0.03 %; three steps of fixed-point iteration remove the rest, as the periodic term's slope is below 0.003.

    Unlike the standard deviation it hardly moves with outliers or a mean that is not zero, and it is an integer sum.

    Raises ValueError where `mean_exponent` is not finite or the sigma is no float. Source: docs/theory.md, section 5.
    """
    if not math.isfinite(mean_exponent) or abs(mean_exponent) > 1000.0:
        raise ValueError(f"mean exponent {mean_exponent!r} is not in -1000..1000 octaves")
    log2_sigma = mean_exponent + MEAN_LOG2_OFFSET + 0.5 + math.log2(fmt.rounding_factor)
    for _ in range(3):
        log2_sigma += mean_exponent - log_moment(2.0**log2_sigma, fmt)
    return float(2.0**log2_sigma)


def _peak() -> float:
    """The u at which P is largest: its derivative is zero where `2 exp(-2 u^2) = exp(-u^2 / 2)`."""
    return math.sqrt(2.0 * _LN2 / 3.0)


def _lower_bound(e: int, fmt: FloatFormat) -> float:
    """The smallest magnitude that is rounded to field `e` or above; infinite past the top field."""
    if e <= 0:
        return 0.0
    if e == 1:
        return math.ldexp(1.0 - math.ldexp(1.0, -(fmt.mantissa_bits + 1)), 1 - fmt.bias)
    if e >= fmt.n_exponents:
        return math.inf
    return math.ldexp(fmt.rounding_factor, e - fmt.bias)


def _mass(a: float, b: float) -> float:
    """P(a <= |Z| < b) of a standard normal Z: by erfc where erf is close to 1, so that a tail keeps its digits."""
    if a > 0.5:
        return math.erfc(a / _SQRT2) - math.erfc(b / _SQRT2)
    return math.erf(b / _SQRT2) - math.erf(a / _SQRT2)


def _magnitude_entropy(e: int, sigma: float, fmt: FloatFormat) -> float:
    """The sum of `-p log2 p` over the words of field `e`, signs left out."""
    a, b = _lower_bound(e, fmt) / sigma, _lower_bound(e + 1, fmt) / sigma
    mass = _mass(a, b)
    if mass < 1e-300:  # worth no bits, and its cells may be too narrow for a float
        return 0.0
    n_cells = 1 << fmt.mantissa_bits
    if e == fmt.n_exponents - 1:
        if fmt.has_infinity:
            return -mass * math.log2(mass)  # one word
        n_cells -= 1  # the last mantissa is NaN, and what is larger saturates
    width = math.ldexp(1.0, max(e, 1) - fmt.bias - fmt.mantissa_bits) / sigma
    if e == 0:
        n_cells = min(n_cells, math.ceil(40.0 / width) + 1)  # nothing lies beyond 40 sigma
    if n_cells <= _MOST_CELLS:
        zero_cell = 0.0 if e == 0 else math.ldexp(1.0, e - fmt.bias) / sigma
        inner = [zero_cell + (i + 0.5) * width for i in range(n_cells - 1)]
        cells = (_mass(low, high) for low, high in pairwise([a, *inner, b]))
        return -math.fsum(p * math.log2(p) for p in cells if p > 0.0)
    # The first cell is narrower: half of zero's lies on this side, and below a power of two the grid is twice as fine.
    narrow = {0: 0.5, 1: 1.0}.get(e, 0.75)
    first_cell = -_mass(a, a + narrow * width) * math.log2(narrow)
    second_moment = mass - 2.0 * (_times_density(b) - _times_density(a))
    return -mass * math.log2(2.0 * width / math.sqrt(2.0 * math.pi)) + second_moment / (2.0 * _LN2) + first_cell


def _times_density(z: float) -> float:
    """`z phi(z)` of the standard normal density, 0 at infinity."""
    return 0.0 if math.isinf(z) else z * math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)


def _check_sigma(sigma: float) -> None:
    if not (math.isfinite(sigma) and sigma > 0.0):
        raise ValueError(f"sigma {sigma!r} is not a positive, finite number")


def _check_size(size: int, fmt: FloatFormat) -> None:
    if not 1 <= size <= fmt.max_window_start(0):
        raise ValueError(f"window size {size!r} is not in 1..{fmt.max_window_start(0)}, for {fmt.name}")
