class Larder < Formula
  desc "Runs Mixture-of-Experts language models that are larger than memory"
  homepage "{homepage}"
  version "{version}"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    on_arm do
      url "{url}/{macos}"
      sha256 "{macos:sha256}"
    end
    on_intel do
      url "{url}/{macos-intel}"
      sha256 "{macos-intel:sha256}"
    end
  end

  on_linux do
    on_arm do
      url "{url}/{arm}"
      sha256 "{arm:sha256}"
    end
    on_intel do
      url "{url}/{linux}"
      sha256 "{linux:sha256}"
    end
  end

  def install
    bin.install "larder"
    pkgshare.install "models"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/larder.bash" => "larder"
    zsh_completion.install "completions/_larder"
    fish_completion.install "completions/larder.fish"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/larder --version")
    # The demo model comes with the formula.
    assert_match "stopped at --max-tokens", shell_output("#{bin}/larder run -p 'Once upon a time' -n 2 2>&1")
  end
end
