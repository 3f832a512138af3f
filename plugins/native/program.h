// A parsed program and the arithmetic of its expressions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "format.h"

namespace lacache {

// What a user is told; thrown inside the library, logged at its border.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Shape {
  int rank = 0;
  int64_t dims[kMaxRank] = {};
};

using Expression = std::vector<int64_t>;

struct TensorRule {
  int64_t dtype = 0;
  int rank = 0;
  std::vector<Expression> shape;  // of an output
};

struct Kernel {
  std::string name;
  std::string image;
  unsigned threads = 0;
  unsigned shared = 0;
};

struct ArgumentRule {
  Argument kind = Argument::kNull;
  int index = 0;
  Expression value;
};

struct Launch {
  int kernel = 0;
  Expression condition;
  Expression grid[3];
  std::vector<ArgumentRule> arguments;
};

struct Program {
  std::string blob;
  std::string op;
  int64_t sm = 0;
  std::vector<TensorRule> inputs;
  std::vector<TensorRule> outputs;
  Expression workspace;
  std::vector<Kernel> kernels;
  std::vector<Launch> launches;

  // Throws Failure unless `data` is a complete, consistent program of this ABI.
  static Program parse(void const* data, size_t size);
};

// Evaluates over whatever `Builder` calls a value: int64 at run time, TensorRT's dimension
// expressions at build time. The stack was checked when the program was parsed.
template <class Builder>
typename Builder::Value evaluate(Expression const& expression, Builder& builder) {
  typename Builder::Value stack[kMaxStack] = {};
  int depth = 0;
  for (int64_t word : expression) {
    auto const op = static_cast<Op>(word & 0xff);
    int64_t const operand = word >> 8;
    if (op == Op::kConstant) {
      stack[depth++] = builder.constant(operand);
    } else if (op == Op::kDimension) {
      stack[depth++] =
          builder.dimension(static_cast<int>(operand / 8), static_cast<int>(operand % 8));
    } else {
      --depth;
      stack[depth - 1] = builder.apply(op, stack[depth - 1], stack[depth]);
    }
  }
  return stack[0];
}

// Evaluates for concrete input shapes; throws Failure on overflow and division by zero.
int64_t evaluate(Expression const& expression, std::vector<Shape> const& inputs);

// Throws Failure unless the shapes have the ranks that the program declares.
void checkShapes(Program const& program, std::vector<Shape> const& inputs);

// One launch for concrete shapes.
struct ResolvedLaunch {
  int launch = 0;
  int kernel = 0;
  unsigned grid[3] = {};
  std::vector<int32_t> scalars;  // one per argument, 0 for pointers
};

// The launches that run, in order. Throws Failure where a grid or scalar is out of range.
std::vector<ResolvedLaunch> resolve(Program const& program, std::vector<Shape> const& inputs);

}  // namespace lacache
