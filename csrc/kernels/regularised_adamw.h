// AdamW with a fused group penalty over many tensors. The definition, NaN and infinity included, is
// pyprune/ops/regularised_adamw/reference.py; the random bits are defined in philox.py next to it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/storage.h"

namespace pyprune {

// Elements that share a scale of the 8-bit moments and a block of random bits.
constexpr int kAdamBlock = 128;

enum class AdamPenalty : int { kNone, kL1, kL2 };

struct AdamTensor {
  void* weight;
  const void* gradient;
  void* first;   // float32, or uint8 codes
  void* second;  // likewise
  float* first_scale;   // one a block; null unless coded
  float* second_scale;
  std::int64_t rows;  // the weight as a row-major matrix
  std::int64_t cols;
  AdamPenalty penalty;
  bool by_row;                // a group is a row, else a column
  const std::int64_t* index;  // the selected groups
  std::int64_t index_count;
  double penalty_weight;  // lambda
  float offset;
  float decay;
  float rate1;
  float beta2;
  float rate2;
  float step_size;
  float root_correction;
  float eps;
  float gradient_scale;
  std::uint32_t step;    // words of the random counter
  std::uint32_t stream;
};

struct AdamOptions {
  DType dtype;
  bool quantised;
  bool stochastic;  // bfloat16 weights only
  std::uint64_t seed;
  int threads;
};

// One step of every tensor, in place. No two tensors may overlap.
void regularised_adamw(const std::vector<AdamTensor>& tensors, const AdamOptions& options);

}  // namespace pyprune
