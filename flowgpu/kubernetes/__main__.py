from flowgpu.kubernetes.operator import main

main()
