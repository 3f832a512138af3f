// The serialised program of a cubin op. plugins/packing.py writes it, program.cpp reads it.
//
// Every integer is a little-endian int64 word. `text` and `bytes` are a length word and that many
// bytes, padded with zeros to a whole word. `expr` is a count word and that many instructions.
//
//   kMagic, kAbi, sm (89, 90, ...), op name: text
//   inputs:   count, then each: dtype, rank
//   outputs:  count, then each: dtype, rank, rank x expr
//   workspace in bytes: expr, evaluated at a profile's largest dimensions; covers all smaller ones
//   kernels:  count, then each: entry name: text, cubin (or PTX with a final zero): bytes,
//             threads per block, dynamic shared memory in bytes
//   launches: count, then each: kernel index, condition: expr, grid x, y, z: expr,
//             arguments: count, then each: Argument kind, tensor index (pointers) or expr (scalars)
//   FNV-1a 64 of everything above
//
// An op runs its launches in order and skips those whose condition is 0 or whose grid is empty.
// The SHA-256 of this file is the ABI hash: plans made with another layout are refused.
#pragma once

#include <cstdint>

namespace lacache {

constexpr int64_t kMagic = 0x314e49425543434c;  // "LCCUBIN1"

#ifndef LACACHE_ABI
#error "define LACACHE_ABI: the first 8 bytes of this file's SHA-256 as a little-endian int64"
#endif
constexpr int64_t kAbi = static_cast<int64_t>(LACACHE_ABI);

// Data types have TensorRT's numbers (kFLOAT 0, kHALF 1, kINT8 2, kINT32 3, kFP8 6, kBF16 7).
constexpr int64_t kMaxDataType = 15;

constexpr int kMaxRank = 8;
constexpr int kMaxTensors = 32;
constexpr int kMaxKernels = 32;
constexpr int kMaxLaunches = 32;
constexpr int kMaxArguments = 64;
constexpr int kMaxInstructions = 256;
constexpr int kMaxStack = 32;
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxShared = 1 << 20;

// An instruction is opcode | operand << 8. The arithmetic has the numbers of TensorRT's
// DimensionOperation; comparisons give 0 or 1.
enum class Op : int64_t {
  kSum = 0,
  kProd = 1,
  kMax = 2,
  kMin = 3,
  kSub = 4,
  kEqual = 5,
  kLess = 6,
  kFloorDiv = 7,
  kCeilDiv = 8,
  kConstant = 16,   // pushes the operand
  kDimension = 17,  // pushes dimension operand % 8 of input operand / 8
};

enum class Argument : int64_t {
  kInput = 0,      // device pointer
  kOutput = 1,     // device pointer
  kWorkspace = 2,  // device pointer
  kNull = 3,       // a null device pointer: Triton's unused scratch
  kScalar = 4,     // int32
};

}  // namespace lacache
