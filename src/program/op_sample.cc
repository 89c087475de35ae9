#include "program/op_sample.h"

#include "base/random.h"

namespace troupe {

ValueId SampleBuilder::tensor(const std::string& name, const Shape& shape, const Options& options) {
  std::vector<double> data(static_cast<size_t>(shape.elements()));
  const auto substream = static_cast<uint32_t>(inputs_.size());
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = options.mean +
              options.deviation * random_normal(/*seed=*/1, RandomStream::test, substream, i);
  }
  return values(name, shape, data, options);
}

ValueId SampleBuilder::values(const std::string& name, const Shape& shape,
                              const std::vector<double>& values, const Options& options) {
  TROUPE_CHECK(static_cast<int64_t>(values.size()) == shape.elements(),
               "sample data of wrong size");
  Value value;
  value.name = name;
  value.dtype = options.dtype.value_or(options.accumulation ? accumulation_dtype(dtype_) : dtype_);
  value.shape = shape;
  value.role = Role::input;
  if (options.rows.valid()) value.rows = RowCount{options.rows, options.rows_element};
  const ValueId id = builder_.program().add_value(std::move(value));
  inputs_.push_back({id, values, options.differentiable});
  return id;
}

ValueId SampleBuilder::integers(const std::string& name, const Shape& shape,
                                const std::vector<int32_t>& values) {
  TROUPE_CHECK(static_cast<int64_t>(values.size()) == shape.elements(),
               "sample data of wrong size");
  const ValueId id = builder_.input(name, DType::i32, shape);
  inputs_.push_back({id, {values.begin(), values.end()}, false});
  return id;
}

ValueId SampleBuilder::integers64(const std::string& name, const Shape& shape,
                                  const std::vector<int64_t>& values) {
  TROUPE_CHECK(static_cast<int64_t>(values.size()) == shape.elements(),
               "sample data of wrong size");
  const ValueId id = builder_.input(name, DType::i64, shape);
  inputs_.push_back({id, {values.begin(), values.end()}, false});
  return id;
}

void SampleBuilder::result(ValueId id) {
  results_.push_back({id, true});
}

void SampleBuilder::result_without_gradient(ValueId id) {
  results_.push_back({id, false});
}

}  // namespace troupe
