# Libraries from the distribution's packages. What is missing is reported all at once, with the
# Debian packages to install.
include_guard()

add_library(troupe_dependencies INTERFACE)
set(TROUPE_MISSING_PACKAGES "")

# Packages that were unpacked, not installed (scripts/install_dependencies.sh): their libraries need
# each other, which only the older of the two kinds of search paths in programs serves.
set(troupe_unpacked "${CMAKE_SOURCE_DIR}/build-dependencies/debian/usr")
if(EXISTS "${troupe_unpacked}")
  list(APPEND CMAKE_PREFIX_PATH "${troupe_unpacked}")
  set(folder "${troupe_unpacked}/lib/${CMAKE_LIBRARY_ARCHITECTURE}")
  list(APPEND CMAKE_BUILD_RPATH "${folder}")
  target_link_options(troupe_dependencies INTERFACE
    -Wl,--disable-new-dtags "-Wl,-rpath-link,${folder}")
endif()

# A header, searched in the usual places.
function(troupe_need_header header package)
  string(MAKE_C_IDENTIFIER "TROUPE_HEADER_${header}" variable)
  find_path(${variable} ${header} PATH_SUFFIXES ${ARGN})
  mark_as_advanced(${variable})
  if(NOT ${variable})
    list(APPEND TROUPE_MISSING_PACKAGES ${package})
    set(TROUPE_MISSING_PACKAGES "${TROUPE_MISSING_PACKAGES}" PARENT_SCOPE)
  else()
    target_include_directories(troupe_dependencies SYSTEM INTERFACE "${${variable}}")
  endif()
endfunction()

# A library with one header, searched in the usual places and linked.
function(troupe_need_library name header package)
  troupe_need_header(${header} ${package})
  string(MAKE_C_IDENTIFIER "TROUPE_LIBRARY_${name}" variable)
  find_library(${variable} ${name})
  mark_as_advanced(${variable})
  if(${variable})
    target_link_libraries(troupe_dependencies INTERFACE "${${variable}}")
  else()
    list(APPEND TROUPE_MISSING_PACKAGES ${package})
  endif()
  set(TROUPE_MISSING_PACKAGES "${TROUPE_MISSING_PACKAGES}" PARENT_SCOPE)
endfunction()

# A package with a CMake configuration file (or CMake's own find module), linked as `target`.
macro(troupe_need_package name target package)
  find_package(${name} QUIET)
  if(NOT TARGET ${target})
    list(APPEND TROUPE_MISSING_PACKAGES ${package})
  endif()
endmacro()

troupe_need_header(CLI/CLI.hpp libcli11-dev)
troupe_need_header(nlohmann/json.hpp nlohmann-json3-dev)
troupe_need_header(xxhash.h libxxhash-dev)
troupe_need_header(toml++/toml.h libtomlplusplus-dev)
troupe_need_header(cblas.h libopenblas-dev openblas openblas-pthread)

find_library(TROUPE_CBLAS NAMES openblas cblas blas PATH_SUFFIXES openblas-pthread)
mark_as_advanced(TROUPE_CBLAS)
if(TROUPE_CBLAS)
  target_link_libraries(troupe_dependencies INTERFACE "${TROUPE_CBLAS}")
else()
  list(APPEND TROUPE_MISSING_PACKAGES libopenblas-dev)
endif()

troupe_need_library(pcre2-8 pcre2.h libpcre2-dev)
troupe_need_library(utf8proc utf8proc.h libutf8proc-dev)
troupe_need_library(sentencepiece sentencepiece_processor.h libsentencepiece-dev)

# Chart.js, which pages of reports carry in them (TroupeEmbed.cmake).
find_file(TROUPE_CHART_JS NAMES chart.min.js Chart.min.js NO_DEFAULT_PATH
          PATHS "${troupe_unpacked}/share/javascript/chart.js" /usr/share/javascript/chart.js
                /usr/local/share/javascript/chart.js)
mark_as_advanced(TROUPE_CHART_JS)
if(NOT TROUPE_CHART_JS)
  list(APPEND TROUPE_MISSING_PACKAGES libjs-chart.js)
endif()

troupe_need_package(fmt fmt::fmt libfmt-dev)
if(TROUPE_TESTS)
  troupe_need_package(GTest GTest::gtest_main libgtest-dev)
endif()
if(TROUPE_BENCH)
  troupe_need_package(benchmark benchmark::benchmark libbenchmark-dev)
endif()

if(TROUPE_MISSING_PACKAGES)
  list(REMOVE_DUPLICATES TROUPE_MISSING_PACKAGES)
  list(JOIN TROUPE_MISSING_PACKAGES " " packages)
  message(FATAL_ERROR "Troupe needs libraries that are not installed. On Debian or Ubuntu:\n"
                      "  apt-get install ${packages}\n"
                      "or run scripts/install_dependencies.sh, then configure again.")
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
target_link_libraries(troupe_dependencies INTERFACE fmt::fmt Threads::Threads)
