import sys

from attn_ext.profile.cli import main

sys.exit(main())
