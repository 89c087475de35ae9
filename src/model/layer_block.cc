#include "model/layer_block.h"

#include <fmt/format.h>
#include <string>

#include "model/model_state.h"
#include "model/read_parameter.h"

namespace troupe {

ValueId SharedTables::rope(Builder& builder, const RopeTableAttributes& attributes, DType dtype) {
  for (const Table& table : tables_) {
    if (table.attributes == attributes && builder.value(table.value).dtype == dtype) {
      return table.value;
    }
  }
  const std::string name =
      tables_.empty() ? "rope_table" : fmt::format("rope_table_{}", tables_.size());
  const ValueId value = rope_table(builder, attributes, dtype, name);
  tables_.push_back({attributes, value});
  return value;
}

ValueId BlockContext::parameter(ParameterId id) const {
  return id.valid() ? read_parameter(builder, state, id) : ValueId{};
}

const ModelPart& BlockContext::part() const {
  return state.part;
}

}  // namespace troupe
