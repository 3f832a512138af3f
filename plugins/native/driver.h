// The CUDA driver, opened when first needed, and the kernels of a program in it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program.h"

namespace lacache {

struct Pointers {
  void const* const* inputs = nullptr;
  void* const* outputs = nullptr;
  void* workspace = nullptr;
};

// A program and its kernels. Equal programs of one process are one object, which lives as long as
// the process: the 32 Attention nodes of a plan load their cubins once, and a captured graph never
// outlives its kernels.
class LoadedProgram {
 public:
  // The object for these bytes. Throws Failure as Program::parse does.
  static std::shared_ptr<LoadedProgram> intern(void const* data, size_t size);

  explicit LoadedProgram(Program parsed) : program(std::move(parsed)) {}

  // Makes the kernels resident in the current context. Not allowed during stream capture unless it
  // was done before. Throws Failure where there is no driver or the GPU is not the program's.
  void prepare();

  // Launches on `stream`; calls nothing else of the driver once `prepare` was done in this context.
  void enqueue(std::vector<Shape> const& inputs, Pointers const& pointers, void* stream);

  Program const program;

 private:
  void load(int device);

  std::mutex mutex_;
  std::vector<void*> kernels_;
  std::vector<unsigned long long> contexts_;  // in which the kernels are resident
};

}  // namespace lacache
