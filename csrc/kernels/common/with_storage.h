// From a run-time dtype to a storage type.
#pragma once

#include "kernels/common/storage.h"

namespace pyprune {

// Calls call(T{}) for the storage type T of dtype.
template <class Call>
void with_storage(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kFloat32:
      return call(float{});
    case DType::kBFloat16:
      return call(BFloat16{});
    case DType::kFloat16:
      return call(Float16{});
  }
}

}  // namespace pyprune
