// The storage types of the kernels: tags around the raw bits. Arithmetic never happens on them (see storage-inl.h).
#pragma once

#include <cstdint>

namespace pyprune {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

}  // namespace pyprune
