"""What tests share: tiny models made offline, and scripts run on several ranks."""
