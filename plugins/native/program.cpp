#include "program.h"

#include <cstring>
#include <limits>

namespace lacache {
namespace {

constexpr char kRebuild[] = "; rebuild the engine: lacache-trt build BUNDLE OUT --force";

// Takes words and bytes off a blob, never past its end.
class Reader {
 public:
  Reader(char const* data, size_t size) : data_(data), left_(size) {}

  int64_t word() {
    int64_t value = 0;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }

  int64_t word(char const* what, int64_t low, int64_t high) {
    int64_t const value = word();
    if (value < low || value > high) {
      throw Failure(std::string("the plugin's program is damaged: ") + what + " is " +
                    std::to_string(value) + kRebuild);
    }
    return value;
  }

  std::string bytes() {
    int64_t const size = word("a length", 0, static_cast<int64_t>(left_));
    std::string value(take(static_cast<size_t>(size)), static_cast<size_t>(size));
    take(static_cast<size_t>(-size & 7));
    return value;
  }

  bool empty() const { return left_ == 0; }

 private:
  char const* take(size_t size) {
    if (size > left_) {
      throw Failure(std::string("the plugin's program is truncated") + kRebuild);
    }
    char const* at = data_;
    data_ += size;
    left_ -= size;
    return at;
  }

  char const* data_;
  size_t left_;
};

int64_t fnv1a(char const* data, size_t size) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ static_cast<unsigned char>(data[i])) * 0x100000001b3u;
  }
  return static_cast<int64_t>(hash);
}

[[noreturn]] void badExpression(char const* why) {
  throw Failure(std::string("the plugin's program is damaged: expression ") + why + kRebuild);
}

// Reads an expression and proves that it never leaves the stack or the inputs' dimensions.
Expression readExpression(Reader& reader, std::vector<TensorRule> const& inputs) {
  Expression expression(
      static_cast<size_t>(reader.word("an expression's length", 1, kMaxInstructions)));
  int depth = 0;
  for (int64_t& word : expression) {
    word = reader.word();
    int64_t const code = word & 0xff;
    int64_t const operand = word >> 8;
    if (code == static_cast<int64_t>(Op::kConstant)) {
      ++depth;
    } else if (code == static_cast<int64_t>(Op::kDimension)) {
      if (operand < 0 || operand / 8 >= static_cast<int64_t>(inputs.size()) ||
          operand % 8 >= inputs[static_cast<size_t>(operand / 8)].rank) {
        badExpression("reads a dimension that no input has");
      }
      ++depth;
    } else if (code > static_cast<int64_t>(Op::kCeilDiv) || operand != 0 || --depth < 1) {
      badExpression("is not arithmetic");
    }
    if (depth > kMaxStack) {
      badExpression("is too deep");
    }
  }
  if (depth != 1) {
    badExpression("does not give one value");
  }
  return expression;
}

void readTensors(Reader& reader, Program& program) {
  program.inputs.resize(static_cast<size_t>(reader.word("the input count", 0, kMaxTensors)));
  for (TensorRule& rule : program.inputs) {
    rule.dtype = reader.word("a data type", 0, kMaxDataType);
    rule.rank = static_cast<int>(reader.word("a rank", 0, kMaxRank));
  }
  program.outputs.resize(static_cast<size_t>(reader.word("the output count", 1, kMaxTensors)));
  for (TensorRule& rule : program.outputs) {
    rule.dtype = reader.word("a data type", 0, kMaxDataType);
    rule.rank = static_cast<int>(reader.word("a rank", 0, kMaxRank));
    for (int axis = 0; axis < rule.rank; ++axis) {
      rule.shape.push_back(readExpression(reader, program.inputs));
    }
  }
}

void readKernels(Reader& reader, Program& program) {
  program.kernels.resize(static_cast<size_t>(reader.word("the kernel count", 1, kMaxKernels)));
  for (Kernel& kernel : program.kernels) {
    kernel.name = reader.bytes();
    kernel.image = reader.bytes();
    if (kernel.name.empty() || kernel.name.find('\0') != std::string::npos ||
        kernel.image.empty()) {
      throw Failure(std::string("the plugin's program is damaged: a kernel is empty") + kRebuild);
    }
    kernel.threads = static_cast<unsigned>(reader.word("a block size", 1, kMaxThreads));
    kernel.shared = static_cast<unsigned>(reader.word("a shared memory size", 0, kMaxShared));
  }
}

ArgumentRule readArgument(Reader& reader, Program const& program) {
  ArgumentRule rule;
  rule.kind = static_cast<Argument>(reader.word("an argument kind", 0, 4));
  if (rule.kind == Argument::kInput) {
    rule.index = static_cast<int>(
        reader.word("an input index", 0, static_cast<int64_t>(program.inputs.size()) - 1));
  } else if (rule.kind == Argument::kOutput) {
    rule.index = static_cast<int>(
        reader.word("an output index", 0, static_cast<int64_t>(program.outputs.size()) - 1));
  } else if (rule.kind == Argument::kScalar) {
    rule.value = readExpression(reader, program.inputs);
  } else {
    reader.word("an unused index", 0, 0);
  }
  return rule;
}

void readLaunches(Reader& reader, Program& program) {
  program.launches.resize(static_cast<size_t>(reader.word("the launch count", 1, kMaxLaunches)));
  auto const kernels = static_cast<int64_t>(program.kernels.size());
  for (Launch& launch : program.launches) {
    launch.kernel = static_cast<int>(reader.word("a kernel index", 0, kernels - 1));
    launch.condition = readExpression(reader, program.inputs);
    for (Expression& size : launch.grid) {
      size = readExpression(reader, program.inputs);
    }
    int64_t const count = reader.word("an argument count", 0, kMaxArguments);
    for (int64_t i = 0; i < count; ++i) {
      launch.arguments.push_back(readArgument(reader, program));
    }
  }
}

struct Integers {
  using Value = int64_t;
  std::vector<Shape> const& inputs;

  int64_t constant(int64_t value) const { return value; }
  int64_t dimension(int input, int axis) const {
    return inputs[static_cast<size_t>(input)].dims[axis];
  }

  int64_t apply(Op op, int64_t a, int64_t b) const {
    int64_t result = 0;
    switch (op) {
      case Op::kSum:
        return checked(__builtin_add_overflow(a, b, &result), result);
      case Op::kProd:
        return checked(__builtin_mul_overflow(a, b, &result), result);
      case Op::kSub:
        return checked(__builtin_sub_overflow(a, b, &result), result);
      case Op::kMax:
        return a > b ? a : b;
      case Op::kMin:
        return a < b ? a : b;
      case Op::kEqual:
        return a == b;
      case Op::kLess:
        return a < b;
      case Op::kFloorDiv:
      case Op::kCeilDiv:
        if (b <= 0 || a < 0) {
          throw Failure("a dimension expression divides by zero or a negative number");
        }
        return a / b + (op == Op::kCeilDiv && a % b != 0);
      default:
        throw Failure("a dimension expression has an unknown operation");
    }
  }

  static int64_t checked(bool overflow, int64_t const& value) {
    if (overflow) {
      throw Failure("a dimension expression overflows");
    }
    return value;
  }
};

}  // namespace

Program Program::parse(void const* data, size_t size) {
  auto const* bytes = static_cast<char const*>(data);
  if (bytes == nullptr || size < 4 * sizeof(int64_t)) {
    throw Failure(std::string("the plugin's program is truncated") + kRebuild);
  }
  Program program;
  program.blob.assign(bytes, size);
  Reader reader(bytes, size);
  reader.word("the first word", kMagic, kMagic);
  if (reader.word() != kAbi) {
    throw Failure(
        std::string("the plugin's program was made for another version of the plugin library") +
        kRebuild);
  }
  Reader trailer(bytes + size - sizeof(int64_t), sizeof(int64_t));
  if (trailer.word() != fnv1a(bytes, size - sizeof(int64_t))) {
    throw Failure(std::string("the plugin's program is damaged: wrong checksum") + kRebuild);
  }
  program.sm = reader.word("the SM", 50, 999);
  program.op = reader.bytes();
  readTensors(reader, program);
  program.workspace = readExpression(reader, program.inputs);
  readKernels(reader, program);
  readLaunches(reader, program);
  reader.word();
  if (!reader.empty()) {
    throw Failure(std::string("the plugin's program has trailing bytes") + kRebuild);
  }
  return program;
}

int64_t evaluate(Expression const& expression, std::vector<Shape> const& inputs) {
  Integers integers{inputs};
  return evaluate<Integers>(expression, integers);
}

void checkShapes(Program const& program, std::vector<Shape> const& inputs) {
  bool good = inputs.size() == program.inputs.size();
  for (size_t i = 0; good && i < inputs.size(); ++i) {
    good = inputs[i].rank == program.inputs[i].rank;
    for (int axis = 0; good && axis < inputs[i].rank; ++axis) {
      good = inputs[i].dims[axis] >= 0;
    }
  }
  if (!good) {
    throw Failure(program.op + ": the inputs have other ranks than its program declares");
  }
}

std::vector<ResolvedLaunch> resolve(Program const& program, std::vector<Shape> const& inputs) {
  checkShapes(program, inputs);
  constexpr int64_t kMost[3] = {std::numeric_limits<int32_t>::max(), 65535, 65535};
  std::vector<ResolvedLaunch> resolved;
  for (size_t i = 0; i < program.launches.size(); ++i) {
    Launch const& launch = program.launches[i];
    if (evaluate(launch.condition, inputs) == 0) {
      continue;
    }
    ResolvedLaunch step;
    step.launch = static_cast<int>(i);
    step.kernel = launch.kernel;
    bool empty = false;
    for (int axis = 0; axis < 3; ++axis) {
      int64_t const size = evaluate(launch.grid[axis], inputs);
      if (size < 0 || size > kMost[axis]) {
        throw Failure(program.op + ": a grid of " + std::to_string(size) +
                      " blocks cannot be launched");
      }
      step.grid[axis] = static_cast<unsigned>(size);
      empty = empty || size == 0;
    }
    if (empty) {
      continue;
    }
    for (ArgumentRule const& rule : launch.arguments) {
      int64_t const value = rule.kind == Argument::kScalar ? evaluate(rule.value, inputs) : 0;
      if (value != static_cast<int32_t>(value)) {
        throw Failure(program.op + ": " + std::to_string(value) +
                      " does not fit a kernel argument");
      }
      step.scalars.push_back(static_cast<int32_t>(value));
    }
    resolved.push_back(std::move(step));
  }
  return resolved;
}

}  // namespace lacache
