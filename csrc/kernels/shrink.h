// Multiplies selected rows or columns by a factor. The definition, NaN and infinity included, is
// pyprune/ops/shrink/reference.py.
#pragma once

#include "kernels/common/selection.h"

namespace pyprune {

// w *= factor on the selection, in place; a factor of 0 writes +0.
void shrink(void* w, float factor, const Selection& selection);

}  // namespace pyprune
