// Builder: emits operations into a program, one after the other, each checked and completed by its
// kind's shape rule. Models, derivatives and passes write programs through it.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "program/op_spec.h"
#include "program/program.h"

namespace troupe {

class Builder {
 public:
  explicit Builder(Program& program) : program_(program) {}

  Program& program() { return program_; }
  const Value& value(ValueId id) const { return program_.value(id); }

  // Stamped on every operation that is emitted from now on.
  Place place;

  // A tensor that the host writes before each run.
  ValueId input(const std::string& name, DType dtype, const Shape& shape);
  // A tensor that operations write or accumulate into and the host reads after the run.
  ValueId metric(const std::string& name, DType dtype, const Shape& shape);
  ValueId state(StateId id) { return program_.state_value(id); }

  // Emits one operation and returns its outputs. `name` names the first output ("x" gives "x", the
  // others "x.lse" and so on). Invalid ids in `inputs` are absent optional inputs.
  std::vector<ValueId> emit(const OpSpec& spec, const Attributes& attributes,
                            std::span<const ValueId> inputs, const std::string& name);
  std::vector<ValueId> emit(const OpSpec& spec, const Attributes& attributes,
                            std::initializer_list<ValueId> inputs, const std::string& name) {
    return emit(spec, attributes, std::span<const ValueId>(inputs.begin(), inputs.size()), name);
  }

 private:
  Program& program_;
};

// Gives a builder back its place at the end of a block.
class PlaceScope {
 public:
  explicit PlaceScope(Builder& builder) : builder_(builder), place_(builder.place) {}
  // Operations of the block are at `place`.
  PlaceScope(Builder& builder, const Place& place) : PlaceScope(builder) { builder.place = place; }
  ~PlaceScope() { builder_.place = place_; }
  PlaceScope(const PlaceScope&) = delete;
  PlaceScope& operator=(const PlaceScope&) = delete;

 private:
  Builder& builder_;
  Place place_;
};

}  // namespace troupe
