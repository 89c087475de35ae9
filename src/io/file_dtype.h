// Element types as they occur in safetensors files: those of DType that are kept beyond a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"

namespace troupe {

enum class FileDType : uint8_t { f64, f32, bf16, f16, f8e4m3, i64, i32, u8 };

inline constexpr FileDType kFileDTypes[] = {FileDType::f64, FileDType::f32,    FileDType::bf16,
                                            FileDType::f16, FileDType::f8e4m3, FileDType::i64,
                                            FileDType::i32, FileDType::u8};

constexpr size_t size_of(FileDType dtype) {
  switch (dtype) {
    case FileDType::f64:
    case FileDType::i64:
      return 8;
    case FileDType::f32:
    case FileDType::i32:
      return 4;
    case FileDType::bf16:
    case FileDType::f16:
      return 2;
    case FileDType::f8e4m3:
    case FileDType::u8:
      return 1;
  }
  return 0;
}

// The name in a safetensors header.
constexpr std::string_view name_of(FileDType dtype) {
  switch (dtype) {
    case FileDType::f64:
      return "F64";
    case FileDType::f32:
      return "F32";
    case FileDType::bf16:
      return "BF16";
    case FileDType::f16:
      return "F16";
    case FileDType::f8e4m3:
      return "F8_E4M3";
    case FileDType::i64:
      return "I64";
    case FileDType::i32:
      return "I32";
    case FileDType::u8:
      return "U8";
  }
  return "?";
}

constexpr FileDType to_file_dtype(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return FileDType::f64;
    case DType::f32:
      return FileDType::f32;
    case DType::bf16:
      return FileDType::bf16;
    case DType::f16:
      return FileDType::f16;
    case DType::f8e4m3:
      return FileDType::f8e4m3;
    case DType::f8e5m2:  // only of values within a step
      break;
    case DType::i64:
      return FileDType::i64;
    case DType::i32:
      return FileDType::i32;
    case DType::u8:
      return FileDType::u8;
  }
  return FileDType::u8;
}

// The same type in memory.
constexpr DType to_dtype(FileDType dtype) {
  switch (dtype) {
    case FileDType::f64:
      return DType::f64;
    case FileDType::f32:
      return DType::f32;
    case FileDType::bf16:
      return DType::bf16;
    case FileDType::f16:
      return DType::f16;
    case FileDType::f8e4m3:
      return DType::f8e4m3;
    case FileDType::i64:
      return DType::i64;
    case FileDType::i32:
      return DType::i32;
    case FileDType::u8:
      return DType::u8;
  }
  return DType::u8;
}

}  // namespace troupe
