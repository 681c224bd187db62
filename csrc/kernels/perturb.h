// A weight with its displacement and multiplicative Gaussian noise, into a buffer. The definition, with the numbering
// of the random numbers, is pyprune/ops/perturb/reference.py.
#pragma once

#include <cstdint>

#include "kernels/common/storage.h"

namespace pyprune {

struct Noise {
  float sigma;
  std::uint64_t seed;
  std::uint64_t offset;  // the number of the normal that the first element gets
};

// out = w + sigma * |w| * z with w = w0 + delta, element by element. out: equal to w0 or delta, or disjoint.
void perturb(const void* w0, const void* delta, void* out, std::int64_t count, DType dtype, const Noise& noise,
             int threads);

}  // namespace pyprune
