// A sum in double over a fixed number of lanes: squares of float32 can neither overflow nor vanish, and the result is the
// same on every instruction set. For body files: see foreach_target.h; no include guard on purpose.
#include "kernels/common/storage-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kSumLanes = 32;

// The sum of at(0), ..., at(count - 1).
template <class At>
inline double lane_sum(std::int64_t count, const At& at) {
  double lanes[kSumLanes] = {};
  std::int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] += at(i + lane);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += at(i);
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
