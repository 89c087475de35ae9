# troupe_embed(<target> <header> <NAME=FILE>...)
#
# Compiles files into a target, each as the constant `const std::string_view NAME` that <header>,
# relative to src/, declares in namespace troupe. A changed file is compiled again.
include_guard()

function(troupe_embed target header)
  set(output "${PROJECT_BINARY_DIR}/generated/${target}_files.cc")
  set(files "")
  foreach(pair IN LISTS ARGN)
    string(REGEX REPLACE "^[^=]*=" "" file "${pair}")
    list(APPEND files "${file}")
  endforeach()
  set(writer "${PROJECT_SOURCE_DIR}/cmake/WriteEmbeddedFiles.cmake")
  list(JOIN ARGN "|" pairs)
  add_custom_command(OUTPUT "${output}" DEPENDS ${files} "${writer}" VERBATIM
    COMMAND ${CMAKE_COMMAND} -D "OUTPUT=${output}" -D "HEADER=${header}" -D "PAIRS=${pairs}"
            -P "${writer}")
  target_sources(${target} PRIVATE "${output}")
  set_source_files_properties("${output}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION TRUE)
endfunction()
