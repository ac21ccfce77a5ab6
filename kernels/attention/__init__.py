"""Attention: `api` has the public function, `ops` joins kernels to autograd, `portable` holds the kernels."""
