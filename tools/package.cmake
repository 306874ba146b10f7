# Included by the wheel build (see pyproject.toml): cuda.h from the build environment's
# nvidia-cuda-runtime wheel, the built libraries and programs as part of the package, and what
# shells show of the commands.
if(NOT FLOWGPU_CUDA_INCLUDE)
    find_program(FLOWGPU_PYTHON NAMES python3 python REQUIRED)
    execute_process(
        COMMAND ${FLOWGPU_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/find_cuda.py
        OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    set(FLOWGPU_CUDA_INCLUDE "${found}" CACHE PATH "Folder that holds cuda.h" FORCE)
endif()
install(DIRECTORY ${CMAKE_BINARY_DIR}/lib/ DESTINATION flowgpu/lib USE_SOURCE_PERMISSIONS
        PATTERN "*.a" EXCLUDE)
if(SKBUILD)
    find_program(FLOWGPU_PYTHON NAMES python3 python REQUIRED)
    execute_process(
        COMMAND ${FLOWGPU_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/shell_files.py ${CMAKE_BINARY_DIR}/share
        COMMAND_ERROR_IS_FATAL ANY)
    install(DIRECTORY ${CMAKE_BINARY_DIR}/share/ DESTINATION ${SKBUILD_DATA_DIR}/share)
endif()
install(PROGRAMS ${CMAKE_BINARY_DIR}/bin/flowgpu-emud DESTINATION flowgpu/lib/emu)
install(PROGRAMS ${CMAKE_BINARY_DIR}/bin/flowgpu-pages ${CMAKE_BINARY_DIR}/bin/flowgpu-fill
        ${CMAKE_BINARY_DIR}/bin/flowgpu-together ${CMAKE_BINARY_DIR}/bin/flowgpu-subreaper
        DESTINATION flowgpu/lib)
