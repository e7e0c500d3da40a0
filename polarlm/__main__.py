from polarlm.cli import main

raise SystemExit(main())
