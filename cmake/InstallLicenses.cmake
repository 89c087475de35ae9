# Run by `cmake --install` of a build with TROUPE_BUNDLE: copies the licences of what the installed tree
# contains of others to share/doc/troupe/licenses/PACKAGE, as Debian's packages state them.
#
# UNPACKED   the folder usr of build-dependencies/debian: everything there is licensed alike
# HEADERS    packages whose headers, or scripts, are compiled into the program
# The libraries in TREE/lib/troupe name their packages themselves.
file(GLOB libraries "${TREE}/lib/troupe/*.so*")
set(packages ${HEADERS})
foreach(library IN LISTS libraries)
  get_filename_component(name "${library}" NAME)
  execute_process(COMMAND dpkg-query --search "*/${name}" OUTPUT_VARIABLE owners ERROR_QUIET)
  string(REGEX MATCHALL "[^\n]+" owners "${owners}")
  foreach(owner IN LISTS owners)
    string(REGEX REPLACE ":.*" "" owner "${owner}")
    list(APPEND packages "${owner}")
  endforeach()
endforeach()
file(GLOB copyrights "${UNPACKED}/share/doc/*/copyright")
foreach(package IN LISTS packages)
  if(EXISTS "/usr/share/doc/${package}/copyright")
    list(APPEND copyrights "/usr/share/doc/${package}/copyright")
  endif()
endforeach()
list(REMOVE_DUPLICATES copyrights)
foreach(copyright IN LISTS copyrights)
  get_filename_component(folder "${copyright}" DIRECTORY)
  get_filename_component(package "${folder}" NAME)
  file(COPY_FILE "${copyright}" "${TREE}/share/doc/troupe/licenses/${package}")
endforeach()
