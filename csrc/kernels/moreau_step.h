// The Moreau step: a gradient step, then the group soft-threshold. The definition, NaN and infinity included, is
// pyprune/ops/moreau_step/reference.py.
#pragma once

#include "kernels/common/selection.h"

namespace pyprune {

struct MoreauNumbers {
  float decay;
  float gamma;
  double threshold;  // 0: no group soft-threshold
};

// Sums of squares over all elements, of the stored values: of how far they moved, and of what they are afterwards.
struct StepSums {
  double moved;
  double size;
};

// delta = the group soft-threshold of decay * delta - gamma * grad, in place. delta and grad: disjoint.
StepSums moreau_step(void* delta, const void* grad, const MoreauNumbers& numbers, const Selection& groups);

}  // namespace pyprune
