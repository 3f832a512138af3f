// An entry point for tests: runs a program without TensorRT, through the code that enqueue runs.
#include <cstring>

#include "driver.h"

namespace {

using lacache::Shape;

std::vector<Shape> readShapes(int64_t const* shapes, int32_t count) {
  std::vector<Shape> result;
  for (int32_t i = 0; i < count; ++i) {
    Shape shape;
    shape.rank = static_cast<int>(*shapes++);
    if (shape.rank < 0 || shape.rank > lacache::kMaxRank) {
      throw lacache::Failure("a shape has a bad rank");
    }
    for (int axis = 0; axis < shape.rank; ++axis) {
      shape.dims[axis] = *shapes++;
    }
    result.push_back(shape);
  }
  return result;
}

// One line per fact, for a test to compare: op, sm, output shapes, workspace, launches.
std::string describe(lacache::Program const& program, std::vector<Shape> const& inputs) {
  checkShapes(program, inputs);
  std::string text = "op " + program.op + "\nsm " + std::to_string(program.sm) + "\n";
  for (lacache::TensorRule const& rule : program.outputs) {
    text += "output " + std::to_string(rule.dtype);
    for (lacache::Expression const& size : rule.shape) {
      text += " " + std::to_string(evaluate(size, inputs));
    }
    text += "\n";
  }
  text += "workspace " + std::to_string(evaluate(program.workspace, inputs)) + "\n";
  for (lacache::ResolvedLaunch const& step : resolve(program, inputs)) {
    lacache::Kernel const& kernel = program.kernels[static_cast<size_t>(step.kernel)];
    text += "launch " + std::to_string(step.launch) + " " + kernel.name;
    for (unsigned size : step.grid) {
      text += " " + std::to_string(size);
    }
    text += " " + std::to_string(kernel.threads) + " " + std::to_string(kernel.shared);
    auto const& rules = program.launches[static_cast<size_t>(step.launch)].arguments;
    for (size_t i = 0; i < rules.size(); ++i) {
      if (rules[i].kind == lacache::Argument::kScalar) {
        text += " " + std::to_string(step.scalars[i]);
      }
    }
    text += "\n";
  }
  return text;
}

}  // namespace

enum : int32_t { kDescribe = 0, kPrepare = 1, kEnqueue = 2 };

// `shapes`: rank and dimensions of each input, one after the other. `text` receives the description
// or the failure. Returns 0, or 1 after a failure. Only kPrepare and kEnqueue need a GPU.
extern "C" __attribute__((visibility("default"))) int32_t
lacacheTestRun(int32_t mode, void const* blob, size_t size, int64_t const* shapes,
               int32_t shapeCount, void const* const* inputs, void* const* outputs, void* workspace,
               void* stream, char* text, size_t capacity) noexcept {
  int32_t status = 0;
  std::string message;
  try {
    if (mode == kDescribe) {
      message = describe(lacache::Program::parse(blob, size), readShapes(shapes, shapeCount));
    } else {
      auto loaded = lacache::LoadedProgram::intern(blob, size);
      if (mode == kPrepare) {
        loaded->prepare();
      } else {
        loaded->enqueue(readShapes(shapes, shapeCount), {inputs, outputs, workspace}, stream);
      }
    }
  } catch (std::exception const& failure) {
    status = 1;
    message = failure.what();
  } catch (...) {
    status = 1;
    message = "unknown failure";
  }
  if (text != nullptr && capacity > 0) {
    size_t const length = message.size() < capacity ? message.size() : capacity - 1;
    std::memcpy(text, message.data(), length);
    text[length] = '\0';
  }
  return status;
}
