"""sb3-contrib's RecurrentPPO on a benchmark case: an LSTM and 2x64 tanh each for actor and critic."""

from sb3_contrib import RecurrentPPO
from sb3_parts import ReportIterations, arguments, make_envs
from settings import read_torch_settings


def main() -> None:
    settings = read_torch_settings()
    model = RecurrentPPO(
        "MlpLstmPolicy",
        make_envs(settings),
        policy_kwargs={"lstm_hidden_size": settings.lstm},
        device="cpu",
        **arguments(settings),
    )
    model.learn(settings.total_steps, callback=ReportIterations(settings))


if __name__ == "__main__":
    main()
