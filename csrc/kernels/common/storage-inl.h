// Conversions between storage and float32, branch-free so that they vectorise on every instruction set and round
// the same way on all of them (to nearest, ties to even; NaN stays NaN; overflow becomes infinity).
// Included by body files, inside foreach_target.h: no include guard on purpose.

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float load(float value) { return value; }

inline float load(BFloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

inline float load(Float16 value) {
  const std::uint32_t exponent_mask = 0x7c00u << 13;
  const std::uint32_t shifted = (value.bits & 0x7fffu) << 13;
  const std::uint32_t exponent = shifted & exponent_mask;
  const std::uint32_t rebiased = shifted + ((127u - 15u) << 23);
  const std::uint32_t special = rebiased + ((128u - 16u) << 23);  // infinity and NaN
  const float subnormal = float_of(rebiased + (1u << 23)) - float_of(113u << 23);
  const std::uint32_t magnitude =
      exponent == exponent_mask ? special : (exponent == 0 ? bits_of(subnormal) : rebiased);
  return float_of(magnitude | (static_cast<std::uint32_t>(value.bits & 0x8000u) << 16));
}

inline void store(float* out, float value) { *out = value; }

inline void store(BFloat16* out, float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const std::uint32_t quiet_nan = bits | 0x400000u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<std::uint16_t>((is_nan ? quiet_nan : rounded) >> 16);
}

inline void store(Float16* out, float value) {
  const std::uint32_t sign = bits_of(value) & 0x80000000u;
  const std::uint32_t magnitude = bits_of(value) ^ sign;
  const std::uint32_t too_large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // Adding this constant makes the float adder round a subnormal result at the right bit.
  const std::uint32_t magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + float_of(magic)) - magic;
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const std::uint32_t half =
      magnitude >= ((127u + 16u) << 23) ? too_large : (magnitude < (113u << 23) ? subnormal : normal);
  out->bits = static_cast<std::uint16_t>(half | (sign >> 16));
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
