from decodegate.cli import main

main()
