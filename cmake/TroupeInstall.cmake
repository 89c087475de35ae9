# make install, make package: the program, the model configurations, the man page and completions.
#
#   PREFIX/bin/troupe
#   PREFIX/lib/troupe/             libraries that the program finds nowhere else; with TROUPE_BUNDLE
#                                  all but those that every system with glibc has
#   PREFIX/share/troupe/configs/   where the program looks for them, seen from bin
#   PREFIX/share/...               man page, completions, license
#
# The tree may be moved: the program finds everything from where it lies.
include_guard()
include(GNUInstallDirs)

set(troupe_libraries lib/troupe)
set(troupe_folders "$ORIGIN/../${troupe_libraries}")
if(TROUPE_CUDA AND TROUPE_BUNDLE)
  # Where pip puts NVIDIA's libraries, seen from the program in a wheel.
  foreach(package cu13 cudnn nccl)
    list(APPEND troupe_folders "$ORIGIN/../../../nvidia/${package}/lib")
  endforeach()
elseif(TROUPE_CUDA)
  list(APPEND troupe_folders ${TROUPE_CUDA_LIBRARY_FOLDERS})
endif()
set_target_properties(troupe PROPERTIES INSTALL_RPATH "${troupe_folders}")
if(TROUPE_BUNDLE)
  # Libraries need each other, which only the older of the two kinds of search paths serves.
  target_link_options(troupe PRIVATE -Wl,--disable-new-dtags)
else()
  set_target_properties(troupe PROPERTIES INSTALL_RPATH_USE_LINK_PATH TRUE)
endif()

install(TARGETS troupe RUNTIME_DEPENDENCY_SET troupe_needs RUNTIME DESTINATION bin)
if(TROUPE_BUNDLE)
  # All but the dynamic linker, glibc, gcc's libraries, and the driver of the GPU.
  set(troupe_which PRE_EXCLUDE_REGEXES "^ld-linux"
                                       "^lib(cuda|c|m|dl|rt|util|pthread|gcc_s|stdc\\+\\+)\\.so"
                   DIRECTORIES "${troupe_unpacked}/lib/${CMAKE_LIBRARY_ARCHITECTURE}")
else()
  set(troupe_which POST_INCLUDE_REGEXES "/build-dependencies/" POST_EXCLUDE_REGEXES ".*")
endif()
install(RUNTIME_DEPENDENCY_SET troupe_needs ${troupe_which}
        LIBRARY DESTINATION ${troupe_libraries})
if(TROUPE_MPI_LIBRARIES)
  install(TARGETS ${TROUPE_MPI_LIBRARIES} LIBRARY DESTINATION ${troupe_libraries})
endif()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/configs" DESTINATION share/troupe)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION share/doc/troupe RENAME copyright)

# NVIDIA's libraries, for a tree that has everything with it: cmake --install ... --component nvidia.
# cuDNN and NVRTC load others by name, which lie beside them.
if(TROUPE_CUDA)
  install(CODE "set(libraries ${TROUPE_CUDA_LIBRARIES})" COMPONENT nvidia EXCLUDE_FROM_ALL)
  install(CODE "set(destination \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${troupe_libraries}\")"
          COMPONENT nvidia EXCLUDE_FROM_ALL)
  install(CODE [[
    file(MAKE_DIRECTORY "${destination}")
    foreach(library IN LISTS libraries)
      file(REAL_PATH "${library}" file)
      get_filename_component(folder "${file}" DIRECTORY)
      string(REGEX MATCH "lib[a-zA-Z]+" name "${library}")
      file(GLOB found "${folder}/${name}*.so.[0-9]" "${folder}/${name}*.so.[0-9][0-9]"
                      "${folder}/${name}*.so.[0-9][0-9].[0-9]")
      list(FILTER found EXCLUDE REGEX "[.]alt[.]so")
      foreach(path IN LISTS found)
        get_filename_component(name "${path}" NAME)
        message(STATUS "Installing: ${destination}/${name}")
        file(COPY_FILE "${path}" "${destination}/${name}")
      endforeach()
    endforeach()]] COMPONENT nvidia EXCLUDE_FROM_ALL)
endif()

# The installed program writes them: they follow from its table of options.
install(CODE [[
  function(write_help file)
    set(path "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/share/${file}")
    get_filename_component(folder "${path}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    execute_process(COMMAND "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/bin/troupe" help ${ARGN}
                    OUTPUT_FILE "${path}" COMMAND_ERROR_IS_FATAL ANY)
    message(STATUS "Installing: ${path}")
    list(APPEND CMAKE_INSTALL_MANIFEST_FILES "${CMAKE_INSTALL_PREFIX}/share/${file}")
    set(CMAKE_INSTALL_MANIFEST_FILES "${CMAKE_INSTALL_MANIFEST_FILES}" PARENT_SCOPE)
  endfunction()
  write_help(man/man1/troupe.1 --man)
  write_help(bash-completion/completions/troupe --completion bash)
  write_help(zsh/site-functions/_troupe --completion zsh)
  write_help(fish/vendor_completions.d/troupe.fish --completion fish)
]])

# What is bundled is others' work.
if(TROUPE_BUNDLE)
  install(CODE "
    set(TREE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\")
    set(UNPACKED \"${troupe_unpacked}\")
    set(HEADERS libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libxxhash-dev libjs-chart.js)
    file(MAKE_DIRECTORY \"\${TREE}/share/doc/troupe/licenses\")
    include(\"${PROJECT_SOURCE_DIR}/cmake/InstallLicenses.cmake\")")
endif()

set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_CONTACT "Troupe maintainers")
set(CPACK_PACKAGE_FILE_NAME "troupe-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}")
set(CPACK_STRIP_FILES TRUE)
set(CPACK_PACKAGE_DIRECTORY "${PROJECT_BINARY_DIR}/packages")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
# What it needs of the system is read from the program and the libraries that it has with it.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS TRUE)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS
    "${troupe_unpacked}/lib/${CMAKE_LIBRARY_ARCHITECTURE}")
include(CPack)
