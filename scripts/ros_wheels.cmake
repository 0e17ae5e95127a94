# SPDX-License-Identifier: Apache-2.0
# Only for ROS from PyPI wheels; pass it as -DCMAKE_PROJECT_INCLUDE=<this file>.
# The wheels' exported targets carry the Python and numpy include folders of the machine that built them
# (below /opt/python). Put this interpreter's folders there instead, once the project's targets are known.

function(rmuscle_repair_ros_wheels)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('include'), end='')"
    OUTPUT_VARIABLE python_include COMMAND_ERROR_IS_FATAL ANY)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c "import numpy; print(numpy.get_include(), end='')"
    OUTPUT_VARIABLE numpy_include COMMAND_ERROR_IS_FATAL ANY)
  get_directory_property(imported IMPORTED_TARGETS)
  foreach(target IN LISTS imported)
    get_target_property(folders ${target} INTERFACE_INCLUDE_DIRECTORIES)
    if(NOT folders MATCHES "/opt/python/")
      continue()
    endif()
    list(FILTER folders EXCLUDE REGEX "^/opt/python/")
    list(APPEND folders "${python_include}" "${numpy_include}")
    set_property(TARGET ${target} PROPERTY INTERFACE_INCLUDE_DIRECTORIES "${folders}")
  endforeach()
endfunction()

cmake_language(DEFER CALL rmuscle_repair_ros_wheels)
